"""The budget: what the result must meet, as a share of what the blocks of the given model cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smelt.errors import RecipeError

MEASURES = ("parameters", "macs", "bytes", "latency")


@dataclass(frozen=True)
class Budget:
    """Keep at most the share `keep` of `measure`; bytes are what decoding a token reads, latency is measured."""

    measure: str
    keep: float

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise RecipeError(f"a budget is over one of {', '.join(MEASURES)}, not {self.measure!r}.")
        if isinstance(self.keep, bool) or not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise RecipeError(f"a budget keeps a share above 0 and at most 1 of {self.measure}, not {self.keep!r}.")

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """From a recipe: `{macs: 0.6}`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or len(value) != 1:
            raise RecipeError(
                f"a budget is written as one measure and its share, such as {{macs: 0.6}}, not {value!r}."
            )
        ((measure, keep),) = value.items()
        return cls(str(measure), keep)

    def to_json(self) -> dict[str, float]:
        return {self.measure: self.keep}
