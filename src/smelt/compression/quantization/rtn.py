"""Round-to-nearest without data: the baseline that every other method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smelt.compression.base import METHODS
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.compression.quantization.rounding import round_to_nearest
from smelt.config import renamed


@METHODS.register("rtn", paper="Frantar et al., 2023 (range search of their code)")
@dataclass(frozen=True)
class RoundToNearest(Quantization):
    """Use at 8 bits, or for a fast result without calibration data: rounds each weight to the nearest value."""

    range_search: bool = renamed("search", default=False)  # choose each group's range to minimize |error|^2.4

    convolutions: ClassVar[bool] = True
    needs_chain: ClassVar[bool] = False

    def quantize(self, work: BlockWork) -> None:
        for group in work.groups:
            number_format = work.weight_format(group)
            work.replace_layers(
                group, [round_to_nearest(layer.weight, number_format, self.range_search) for layer in group.layers]
            )
