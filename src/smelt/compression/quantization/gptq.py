"""GPTQ: quantize column by column and compensate each error in the later columns (Frantar et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smelt.compression.base import METHODS, within
from smelt.compression.calibration.observers import HessianObserver
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.compression.quantization.gptq_rounding import DAMPING, round_group
from smelt.compression.quantization.layers import LayerGroup
from smelt.config import renamed
from smelt.numerics.format import Format, QuantizedTensor


@METHODS.register("gptq", paper="Frantar et al., 2023 (arXiv 2210.17323)", needs=("calibration data",))
@dataclass(frozen=True)
class Gptq(Quantization):
    """Use for 3 to 8-bit weights with calibration data; the usual choice."""

    damping: float = DAMPING  # relative to the mean of the Hessian diagonal
    act_order: bool = True  # quantize columns in order of decreasing Hessian diagonal, with fixed qparams
    range_search: bool = renamed("search", default=False)  # choose each group's range to minimize |error|^2.4
    sequential: bool = False  # within a block, calibrate each layer on the quantized layers before it

    convolutions: ClassVar[bool] = True
    needs_chain: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "damping", self.damping, 1e-6, 10.0)

    def quantize(self, work: BlockWork) -> None:
        groups = work.groups
        for batch in [[group] for group in groups] if self.sequential else [groups]:
            observers = [(group, HessianObserver()) for group in batch]
            work.observe(observers)
            for group, hessian in observers:
                work.replace_layers(group, self.round(group, hessian, work.weight_format(group)))

    def round(self, group: LayerGroup, hessian: HessianObserver, number_format: Format) -> list[QuantizedTensor]:
        return round_group(
            group, hessian, number_format, damping=self.damping, act_order=self.act_order, search=self.range_search
        )
