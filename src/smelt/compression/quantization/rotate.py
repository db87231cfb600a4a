"""Rotation alone: weights without outliers, same function (the first step of QuaRot, Ashkboos et al., 2024).

Also useful before comparing quantizers: weights that were already on a coarse grid no longer are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from smelt.compression.base import METHODS, Method, MethodContext
from smelt.compression.quantization.rotation import check_rotatable, random_rotations, rotate_network
from smelt.config import renamed
from smelt.errors import RecipeError
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model


@METHODS.register("rotate", paper="Ashkboos et al., 2024 (arXiv 2404.00456)")
@dataclass(frozen=True)
class Rotate(Method):
    """Use before another quantizer, to remove outliers without changing what the network computes."""

    offloads: ClassVar[bool] = True
    residual: bool = renamed("stream", default=True)  # rotate the residual stream; norms are folded into layers
    values: bool = True  # rotate the values of each head; undone in the attention output

    def __post_init__(self) -> None:
        if not (self.residual or self.values):
            raise RecipeError("rotate has nothing to do: leave residual or values at true.")

    def check(self, anatomy: Anatomy) -> None:
        check_rotatable(anatomy, self.name)

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        rotations = random_rotations(model.anatomy, context.seed, stream=self.residual, values=self.values)
        return rotate_network(model.anatomy, rotations, context.device)
