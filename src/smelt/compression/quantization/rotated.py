"""The frame of methods that rotate before they round: every layer's inputs are spread out, then all is four bits.

The rotations that cost nothing are merged into the weights (`rotation.py`). Two more are computed as the network runs:
a Hadamard transform of what enters the layer that ends a feed-forward and of what enters an attention's output; its
inverse is merged into that layer's weight here, just before the weight is rounded.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch

from smelt.compression.base import MethodContext, one_of, within
from smelt.compression.calibration.observe import SecondMoment
from smelt.compression.quantization.base import BlockWork, Quantization
from smelt.compression.quantization.gptq_rounding import DAMPING, round_group
from smelt.compression.quantization.layers import Group
from smelt.compression.quantization.nearest import nearest
from smelt.compression.quantization.rotation import Rotations, check_rotatable, rotate_network
from smelt.errors import RecipeError
from smelt.kernels.hadamard import hadamard_order, hadamard_transform
from smelt.measure.cost import count_bytes
from smelt.models.anatomy import Anatomy, Part
from smelt.models.model import Model
from smelt.models.quantized import Scheme
from smelt.numerics.format import Quantized


@dataclass(frozen=True)
class RotatedQuantization(Quantization):
    """Rotate, then round weights and inputs."""

    group: int = -1  # values of a row that share a scale; -1: the whole row
    symmetric: bool = True  # the grid has its zero in the middle; otherwise a zero point a group
    inputs: str | None = "int4"  # the format that a layer's inputs are rounded to, a scale a token; null: not at all
    clip: float = 0.9  # the part of an input's range that its grid covers
    rounding: str = "gptq"  # of weights: gptq or rtn
    search: bool = True  # narrow each row's range to what minimises its |error|^2.4
    damping: float = DAMPING  # of the Hessian's mean diagonal, for gptq
    act_order: bool = True  # columns with the largest inputs first, for gptq
    rotate_filters: bool = True  # a Hadamard transform, as the network runs, of what the feed-forward's output reads
    rotate_heads: bool = True  # the same of what the attention's output reads: it mixes the heads

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self.name, "rounding", self.rounding, ("gptq", "rtn"))
        within(self.name, "clip", self.clip, 0.1, 1.0)
        within(self.name, "damping", self.damping, 1e-6, 10.0)
        if self.static:
            raise RecipeError(f"{self.name} takes the scale of inputs from each token: leave static out.")

    @abstractmethod
    def rotations(self, model: Model, context: MethodContext) -> Rotations:
        """The matrices that are merged into the weights."""

    @property
    def scheme(self) -> Scheme:
        return super().scheme if self.inputs is None else replace(super().scheme, clip=self.clip)

    def check(self, anatomy: Anatomy) -> None:
        super().check(anatomy)
        check_rotatable(anatomy, self.name)

    def prepare(self, model: Model, context: MethodContext) -> dict[str, Any]:
        """Rotate; the facts are those of the network before a tied head got its own weight."""
        size = count_bytes(model.network)
        asked = [part for part in model.anatomy.parts if self._asked(part)]
        rotations = self.rotations(model, context)
        rotated = rotate_network(model.anatomy, rotations, context.device)
        return {
            "bytes_before": size,
            **rotated,
            **rotations.facts,
            "layers_rotating_their_inputs": sum(self.rotates(part) for part in asked),
            "widths_without_hadamard": sorted({part.output.columns for part in asked if not self.rotates(part)}),
        }

    def report(self, prepared: dict[str, Any]) -> dict[str, Any]:
        return prepared

    def quantize(self, work: BlockWork) -> None:
        groups = [(group, SecondMoment()) for group in work.groups]
        if self.rounding == "gptq":
            work.observe(groups)
        for group, moment in groups:
            online = not group.writes and self.rotates(group.part)
            if online:
                rotate_inputs(group, moment)
            work.put(group, self.round(group, moment), hadamard=online)

    def rotates(self, part: Part) -> bool:
        """Whether what the part's output reads is transformed as the network runs; some widths have no such matrix."""
        return self._asked(part) and hadamard_order(part.output.columns) is not None

    def _asked(self, part: Part) -> bool:
        return part.units > 0 and (self.rotate_filters if part.kind == "filters" else self.rotate_heads)

    def round(self, group: Group, moment: SecondMoment) -> list[Quantized]:
        if self.rounding == "rtn":
            return [nearest(layer.weight, self.weight_format, self.search) for layer in group.layers]
        return round_group(
            group, moment, self.weight_format, damping=self.damping, act_order=self.act_order, search=self.search
        )


@torch.no_grad()
def rotate_inputs(group: Group, moment: SecondMoment) -> None:
    """Merge the inverse of a transform of the inputs into the weights, and transform what is known of the inputs."""
    for layer in group.layers:
        layer.weight.copy_(hadamard_transform(layer.weight.double()))
    if moment.matrix is not None:
        moment.matrix = hadamard_transform(hadamard_transform(moment.matrix).T)
