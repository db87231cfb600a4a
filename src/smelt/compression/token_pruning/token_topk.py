"""Top-k token pruning as in SpAtten (Wang et al., 2021): the first layers keep all tokens, then fewer and fewer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smelt.compression.base import METHODS, within
from smelt.compression.token_pruning.fixed_counts import FixedCounts


@METHODS.register(
    "token-topk", paper="Wang et al., HPCA 2021 (SpAtten, arXiv 2012.09852)", needs=("calibration data", "labels")
)
@dataclass(frozen=True)
class TokenTopK(FixedCounts):
    """Use where all texts of a length must cost the same; `ltp` keeps more accuracy where texts differ.

    The share of tokens falls linearly to its final value, which the budget decides. Importance adds up over layers.
    """

    dense_layers: int | None = None  # the first ones keep all tokens; null: 3, or 15 % of the layers if that is more

    sums_layers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_layers is not None:
            within(self.name, "dense_layers", self.dense_layers, 0, 1000)

    def fractions(self, share: float, layers: int) -> tuple[float, ...]:
        dense = max(3, round(0.15 * layers)) if self.dense_layers is None else self.dense_layers
        ramp = max(layers - dense, 1)
        return tuple(1 - (1 - share) * max(layer + 1 - dense, 0) / ramp for layer in range(layers))
