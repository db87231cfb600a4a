"""Build an integer graph whose nonlinear functions are tables (NN-LUT) instead of I-BERT's polynomials."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from smelt.numerics.nn_lut import default_table
from smelt.numerics.piecewise_linear import PiecewiseLinear
from smelt.runtime.integer.builder import INT32_MAX, GraphBuilder, QTensor
from smelt.runtime.integer.graph import DTYPES
from smelt.runtime.integer.table_constants import norm_table_constants, softmax_table_constants, table_constants


class TableBuilder(GraphBuilder):
    """A builder with tables of `entries` entries; `tables` replaces those of gelu at the layers it names."""

    def __init__(
        self, inputs: Mapping[str, str], entries: int = 16, tables: Mapping[str, PiecewiseLinear] | None = None
    ) -> None:
        super().__init__(inputs)
        self.entries, self.tables = entries, dict(tables or {})

    def gelu(self, x: QTensor, layer: str) -> QTensor:
        return self._table(x, self.tables.get(layer) or default_table("gelu", self.entries), layer)

    def silu(self, x: QTensor, layer: str) -> QTensor:
        return self._table(x, default_table("silu", self.entries), layer)

    def tanh(self, x: QTensor, layer: str) -> QTensor:
        return self.requantize(self._table(x, default_table("tanh", self.entries), layer), 1 / 127, layer)

    def softmax(self, x: QTensor, mask: QTensor | None, length: int, layer: str, dtype: str = "int8") -> QTensor:
        levels = torch.iinfo(DTYPES[dtype]).max
        attributes, constants, scale = softmax_table_constants(
            x.per_tensor_scale, length, layer, levels, entries=self.entries
        )
        inputs = [x] if mask is None else [x, mask]
        return self.node(
            "softmax_table", inputs, layer, dtype=dtype, scale=scale, bound=levels, attributes={**attributes},
            constants=constants,
        )  # fmt: skip

    def layer_norm(self, x: QTensor, weight: Tensor, bias: Tensor, epsilon: float, layer: str) -> QTensor:
        attributes, constants, scale = norm_table_constants(
            x.per_tensor_scale, x.bound, weight, bias, epsilon, layer, self.entries
        )
        return self.node(
            "layer_norm_table", [x], layer, dtype="int32", scale=scale, bound=INT32_MAX, attributes={**attributes},
            constants=constants,
        )  # fmt: skip

    def rms_norm(self, x: QTensor, weight: Tensor, epsilon: float, layer: str) -> QTensor:
        attributes, constants, scale = norm_table_constants(
            x.per_tensor_scale, x.bound, weight, None, epsilon, layer, self.entries
        )
        return self.node(
            "rms_norm_table", [x], layer, dtype="int32", scale=scale, bound=INT32_MAX, attributes={**attributes},
            constants=constants,
        )  # fmt: skip

    def _table(self, x: QTensor, table: PiecewiseLinear, layer: str) -> QTensor:
        constants, scale = table_constants(table, x.per_tensor_scale, layer, x.bound)
        ends = torch.tensor([-x.bound, x.bound]) * x.per_tensor_scale
        points = torch.cat((ends.double(), table.breakpoints.clamp(float(ends[0]), float(ends[1]))))
        bound = int(float(table(points).abs().max()) / scale) + x.bound + 2  # a rounded slope moves results by half a q
        return self.node(
            "table", [x], layer, dtype="int32", scale=scale, bound=min(bound, INT32_MAX), constants=constants
        )
