"""SmoothQuant: move activation outliers into the weights, so that both fit 8 bits (Xiao et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smelt.compression.base import METHODS, one_of, within
from smelt.compression.calibration.observers import AbsMaxObserver
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.compression.quantization.gptq_rounding import ROUNDINGS, round_block
from smelt.compression.quantization.layers import LayerGroup, observed
from smelt.compression.quantization.scaling import fold_scale, scale_source

MIN_SCALE = 1e-5


@METHODS.register("smoothquant", paper="Xiao et al., 2023 (arXiv 2211.10438)", needs=("calibration data",))
@dataclass(frozen=True)
class SmoothQuant(Quantization):
    """Use for 8-bit weights and 8-bit activations (W8A8) with activation outliers.

    Only layers that a norm feeds are smoothed. `static_activations: true` fixes the scale of the inputs beforehand.
    """

    bits: int = 8
    group_size: int = -1
    symmetric: bool = True
    input_activations: str | None = "int8"
    alpha: float = 0.5  # how much of the activation range moves into the weights; 0.8-0.9 suits Llama-2
    rounding: str = "rtn"  # after smoothing: rtn or gptq

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "alpha", self.alpha, 0.0, 1.0)
        one_of(self.name, "rounding", self.rounding, ROUNDINGS)

    def quantize(self, work: BlockWork) -> None:
        notes = self.smooth(work)
        for group, matrices in round_block(work, self.rounding):
            work.replace_layers(group, matrices)
            for layer in group.layers:
                work.facts[layer.path]["scaling"] = notes.get(layer.path, {"into": None})

    def smooth(self, work: BlockWork) -> dict[str, dict[str, Any]]:
        """Fold the scales of all groups that read a norm; return facts by layer path."""
        groups = [group for group in work.scale_groups if group.is_input_group]
        sources = [(group, scale_source(work.block, group)) for group in groups]
        observers = [(group, source, AbsMaxObserver()) for group, source in sources if source is not None]
        if observers:
            work.observe([(group, observer) for group, _, observer in observers])
        notes: dict[str, dict[str, Any]] = {}
        for group, source, observer in observers:
            scale = smoothing_scale(group, observed(group.path, observer.values), self.alpha)
            fold_scale(group, source, scale)
            spread = float(scale.max() / scale.min())
            notes |= {layer.path: {"into": source.name, "spread": spread} for layer in group.layers}
        return notes


@torch.no_grad()
def smoothing_scale(group: LayerGroup, amax: Tensor, alpha: float) -> Tensor:  # [columns] -> [columns]
    """Return max|x|^alpha / max|w|^(1 - alpha) per channel, over all layers that share the input."""
    weights = group.stacked().abs().amax(0)
    return (amax.pow(alpha) / weights.clamp(min=MIN_SCALE).pow(1 - alpha)).clamp(min=MIN_SCALE)
