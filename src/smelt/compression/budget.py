"""The compression budget: what the result must meet, relative to the blocks of the source model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from smelt.errors import RecipeError

MEASURES = ("parameters", "macs", "bytes", "latency", "heads")


@dataclass(frozen=True)
class Budget:
    """Keep at most the fraction `keep` of `measure`; bytes are those read per decoded token, latency is measured."""

    measure: str
    keep: float

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise RecipeError(f"a budget limits one of {', '.join(MEASURES)}, not {self.measure!r:.80}.")
        if isinstance(self.keep, bool) or not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise RecipeError(
                f"a budget keeps a fraction above 0 and at most 1 of {self.measure}, not {self.keep!r:.80}."
            )

    @classmethod
    def from_config(cls, value: Any) -> Budget:
        """Parse the form used in recipes, `{macs: 0.6}`, or that of the command line, `macs=0.6`."""
        if isinstance(value, str):
            value = _split(value)
        if not isinstance(value, Mapping) or len(value) != 1:
            raise RecipeError(
                "a budget is written as one measure and the fraction to keep, such as {macs: 0.6} or macs=0.6, "
                f"not {value!r:.80}."
            )
        ((measure, keep),) = value.items()
        return cls(str(measure), keep)

    @classmethod
    def config_schema(cls) -> dict[str, Any]:
        fraction = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
        mapping = {
            "type": "object",
            "properties": dict.fromkeys(MEASURES, fraction),
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
        }
        return {
            "description": "the fraction to keep of one measure, such as {macs: 0.6} or macs=0.6",
            "anyOf": [mapping, {"type": "string", "pattern": f"^({'|'.join(MEASURES)})=[0-9.]+$"}],
        }

    def to_json(self) -> dict[str, float]:
        return {self.measure: self.keep}


def _split(text: str) -> Any:
    """Turn `macs=0.6` into {macs: 0.6}; anything else stays as it is, for the error."""
    measure, equals, keep = text.partition("=")
    try:
        return {measure.strip(): float(keep)} if equals else text
    except ValueError:
        return text
