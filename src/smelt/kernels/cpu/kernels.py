"""Linear kernels on CPUs: packed weights with float or integer inputs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.conv import ConvKernel, ConvShape
from smelt.kernels.cpu import operator
from smelt.kernels.cpu.conv import convolve
from smelt.kernels.cpu.plan import FLOAT_TYPES, LinearPlan, make_linear_plan, supports_format, supports_inputs
from smelt.kernels.linear import ActivationQuant, LinearKernel, PackedMatrix


@dataclass
class Prepared:
    """Tasks of a matrix, one per dtype of x. They point into the tensors of the packed matrix."""

    tasks: dict[torch.dtype, operator.Task]
    packed: PackedMatrix
    formats: str  # formats of the product, as passed to the operator


class FloatLinear(LinearKernel):
    """Dequantize weights to float32 in registers. Quantized inputs are fake-quantized first."""

    name = "cpu-float"

    def __init__(self, library: Any) -> None:
        if library.smelt_plan_size() != ctypes.sizeof(LinearPlan):
            raise OSError("the compiled library has a different plan layout")
        self.library = library
        operator.set_library(library)

    def supports(self, packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> bool:
        contiguous = all(tensor.is_contiguous() for tensor in packed.tensors.values())
        on_cpu = packed.device.type == "cpu" and packed.rows > 0 and packed.columns > 0
        return on_cpu and contiguous and dtype in FLOAT_TYPES and supports_format(packed.format, packed.tensors)

    def prepare(self, packed: PackedMatrix, inputs: ActivationQuant | None) -> Prepared:
        quant = inputs if self.quantizes_inputs else None
        tasks = {}
        for dtype in FLOAT_TYPES:
            plan = make_linear_plan(packed.format, packed.rows, packed.columns, packed.tensors, quant, dtype)
            tasks[dtype] = operator.Task(self.library, plan)
        return Prepared(tasks, packed, operator.product_key(packed.format, quant))

    def run(
        self, x: Tensor, packed: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None, prepared: Prepared
    ) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            return self._dense(x, packed, inputs, bias, prepared)
        if inputs is not None and not self.quantizes_inputs:
            x = inputs.fake_quantize(x)
        if torch.compiler.is_compiling():
            tensors = [packed.tensors.get(name) for name in ("codes", "scale", "zero", "negative", "tensor")]
            scale = None if inputs is None or not self.quantizes_inputs else inputs.scale
            return torch.ops.smelt.cpu_linear(x, *tensors, bias, scale, prepared.formats)
        return operator.run(self.library, prepared.tasks[x.dtype], x, bias)

    def dequantize(self, packed: PackedMatrix, prepared: Prepared, dtype: torch.dtype) -> Tensor:
        if torch.compiler.is_compiling():
            return super().dequantize(packed, prepared, dtype)
        return operator.dequantize_rows(self.library, prepared.tasks[dtype], 0, packed.rows, dtype)

    def _dense(
        self, x: Tensor, packed: PackedMatrix, inputs: ActivationQuant | None, bias: Tensor | None, prepared: Prepared
    ) -> Tensor:
        """Multiply with the dequantized matrix, so that gradients pass through."""
        weight = self.dequantize(packed, prepared, x.dtype)
        return F.linear(x if inputs is None else inputs.fake_quantize(x), weight, bias)


class Int8Linear(FloatLinear, ConvKernel):
    """Quantize inputs to int8 (or fewer bits) and multiply integers."""

    name = "cpu-integer"
    quantizes_inputs = True

    def supports(self, packed: PackedMatrix, inputs: ActivationQuant | None, dtype: torch.dtype) -> bool:
        if not super().supports(packed, inputs, dtype) or not supports_inputs(inputs):
            return False
        plan = make_linear_plan(packed.format, packed.rows, packed.columns, packed.tensors, inputs, dtype)
        return bool(self.library.smelt_has_int8(ctypes.addressof(plan)))

    def supports_conv(self, packed: PackedMatrix, inputs: ActivationQuant) -> bool:
        if not supports_inputs(inputs):
            return False
        plan = make_linear_plan(packed.format, packed.rows, packed.columns, packed.tensors, inputs, torch.float32)
        return bool(self.library.smelt_has_conv(ctypes.addressof(plan)))

    def convolve(self, x: Tensor, bias: Tensor | None, *, shape: ConvShape, prepared: Prepared) -> Tensor:
        task = prepared.tasks[x.dtype]
        task.set_bias(bias)
        return convolve(self.library, task.address, x, shape)
