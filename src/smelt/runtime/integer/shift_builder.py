"""Build an integer graph whose nonlinear functions are shifts and additions (I-ViT) instead of I-BERT's polynomials."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.runtime.integer.builder import GraphBuilder, QTensor
from smelt.runtime.integer.constants import INT32_MAX, norm_constants
from smelt.runtime.integer.graph import DTYPES
from smelt.runtime.integer.shift_constants import gelu_shift_constants, softmax_shift_constants


class ShiftBuilder(GraphBuilder):
    """A builder with ShiftGELU, Shiftmax and I-LayerNorm; I-ViT has no tanh, which stays I-BERT's."""

    def gelu(self, x: QTensor, layer: str) -> QTensor:
        attributes, scale = gelu_shift_constants(x.per_tensor_scale, x.bound, layer)
        bound = x.bound << attributes["sigmoid_bits"]
        return self.node("gelu_shift", [x], layer, dtype="int32", scale=scale, bound=bound, attributes={**attributes})

    def softmax(self, x: QTensor, mask: QTensor | None, length: int, layer: str, dtype: str = "int8") -> QTensor:
        levels = torch.iinfo(DTYPES[dtype]).max
        attributes, scale = softmax_shift_constants(x.per_tensor_scale, length, layer, levels)
        inputs = [x] if mask is None else [x, mask]
        return self.node(
            "softmax_shift", inputs, layer, dtype=dtype, scale=scale, bound=levels, attributes={**attributes}
        )

    def layer_norm(self, x: QTensor, weight: Tensor, bias: Tensor, epsilon: float, layer: str) -> QTensor:
        attributes, constants, scale = norm_constants(x.per_tensor_scale, x.bound, weight, bias, epsilon, layer)
        return self.node(
            "layer_norm_shift", [x], layer, dtype="int32", scale=scale, bound=INT32_MAX, attributes={**attributes},
            constants=constants,
        )  # fmt: skip
