"""AWQ: scale up the weights of channels with large inputs before rounding, then clip (Lin et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from smelt.compression.base import METHODS
from smelt.compression.quantization.layers import LayerGroup
from smelt.compression.quantization.scale_search import STEPS, Candidate, ScaleSearch, power_scale


@METHODS.register("awq", paper="Lin et al., 2024 (arXiv 2306.00978)", needs=("calibration data",))
@dataclass(frozen=True)
class Awq(ScaleSearch):
    """Use for 3 and 4-bit weights with few calibration samples."""

    clip: bool = True  # search a clip range per group; never for queries and keys

    def candidates(self, group: LayerGroup, mean: Tensor, amax: Tensor) -> Iterator[Candidate]:
        for step in range(STEPS):
            yield Candidate("mean", step / STEPS, power_scale(mean, step / STEPS))
