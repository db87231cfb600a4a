"""QuaRot: remove outliers with random rotations, then quantize weights and activations (Ashkboos et al., 2024).

The rotation of queries and keys only matters to a quantized KV cache: see `models/kv_cache.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from smelt.compression.base import METHODS, MethodContext
from smelt.compression.quantization.rotated import RotatedQuantization
from smelt.compression.quantization.rotation import Rotations, random_rotations
from smelt.models.model import Model


@METHODS.register("quarot", paper="Ashkboos et al., 2024 (arXiv 2404.00456)", needs=("calibration data",))
@dataclass(frozen=True)
class QuaRot(RotatedQuantization):
    """Use for 4-bit weights and 4-bit activations (W4A4) without training."""

    @property
    def uses_data(self) -> bool:
        return self.rounding == "gptq"

    def rotations(self, model: Model, context: MethodContext) -> Rotations:
        return random_rotations(model.anatomy, context.seed)
