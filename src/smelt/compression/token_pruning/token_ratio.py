"""Fixed-ratio token pruning: each layer drops the same share of the tokens it got, a baseline of `ltp`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smelt.compression.base import METHODS
from smelt.compression.token_pruning.fixed_counts import FixedCounts


@METHODS.register("token-ratio", paper="baseline: the same share in every layer", needs=("calibration data", "labels"))
@dataclass(frozen=True)
class TokenRatio(FixedCounts):
    """Use as a baseline: every layer keeps the same share of the tokens that the one before it left."""

    sums_layers: ClassVar[bool] = False

    def fractions(self, share: float, layers: int) -> tuple[float, ...]:
        return tuple(share ** (layer + 1) for layer in range(layers))
