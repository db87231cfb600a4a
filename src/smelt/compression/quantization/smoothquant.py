"""SmoothQuant: move the outliers of activations into the weights, so that both fit eight bits (Xiao et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smelt.compression.base import METHODS, one_of, within
from smelt.compression.calibration.observe import Largest
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.compression.quantization.layers import Group, observed, sharing_groups
from smelt.compression.quantization.rounding import ROUNDINGS, rounded
from smelt.compression.quantization.scaling import fold, source_of

SMALLEST = 1e-5  # scale


@METHODS.register("smoothquant", paper="Xiao et al., 2023 (arXiv 2211.10438)", needs=("calibration data",))
@dataclass(frozen=True)
class SmoothQuant(Quantization):
    """Divide input channels by a closed form of both ranges, the weights take it up; 8-bit weights and inputs.

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
        for group, matrices in rounded(work, self.rounding, lambda _: self.weight_format):
            work.put(group, matrices)
            for layer in group.layers:
                work.facts[layer.path]["scaling"] = notes.get(layer.path, {"into": None})

    def smooth(self, work: BlockWork) -> dict[str, dict[str, Any]]:
        """Fold the scales of all groups that a norm feeds; returns what was done to each layer."""
        groups = [group for group in sharing_groups(work.block) if group.writes]
        found = [(group, source_of(work.block, group)) for group in groups]
        seen = [(group, source, Largest()) for group, source in found if source is not None]
        if seen:
            work.observe([(group, largest) for group, _, largest in seen])
        notes: dict[str, dict[str, Any]] = {}
        for group, source, largest in seen:
            scale = smoothing(group, observed(group.path, largest.values), self.alpha)
            fold(group, source, scale)
            spread = float(scale.max() / scale.min())
            notes |= {layer.path: {"into": source.name, "spread": spread} for layer in group.layers}
        return notes


@torch.no_grad()
def smoothing(group: Group, largest: Tensor, alpha: float) -> Tensor:  # [columns] -> [columns]
    """max|x|^alpha / max|w|^(1 - alpha) of each channel, over all layers that share the input."""
    weights = group.stacked().abs().amax(0)
    return (largest.pow(alpha) / weights.clamp(min=SMALLEST).pow(1 - alpha)).clamp(min=SMALLEST)
