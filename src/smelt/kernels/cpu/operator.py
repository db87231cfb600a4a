"""The linear kernel as a PyTorch operator, so that `torch.compile` can trace it.

In a graph the tensors are ordinary arguments; the plan that points to them is looked up by their addresses. A plan is
fully determined by addresses and format names, so that it cannot be stale.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.cpu.build import has_bfloat16_arithmetic
from smelt.kernels.cpu.plan import DTYPE_CODES, FLOAT_INPUTS, LinearPlan, make_linear_plan
from smelt.kernels.linear import ActivationQuant
from smelt.numerics.catalog import format_name, get_format
from smelt.numerics.format import Format

MAX_GEMV_TOKENS, MAX_INT8_GEMV_TOKENS = 4, 1  # with float and with quantized inputs
MIN_DENSE_TOKENS = 64  # fewest tokens for a dense GEMM with a dequantized matrix, if the library has no GEMM
UNLIMITED = 1 << 62
MAX_DEQUANTIZED = 1 << 22  # values dequantized at once
_MAX_TASKS = 65536
_tasks: dict[tuple[Any, ...], Task] = {}
_library: Any = None
_definitions = torch.library.Library("smelt", "FRAGMENT")
_definitions.define(
    "cpu_linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? negative, Tensor? divisor, Tensor? bias, "
    "Tensor? x_scale, str formats) -> Tensor"
)


def set_library(library: Any) -> None:
    """Set the library that the operator calls."""
    global _library
    _library = library


class Task:
    """A plan and what each call needs to know."""

    __slots__ = ("address", "columns", "has_bias", "max_gemv_tokens", "min_dense_tokens", "plan", "rows")

    def __init__(self, library: Any, plan: LinearPlan) -> None:
        self.plan, self.address = plan, ctypes.addressof(plan)
        self.rows, self.columns = plan.rows, plan.columns
        self.max_gemv_tokens, self.min_dense_tokens = MAX_GEMV_TOKENS, MIN_DENSE_TOKENS
        self.has_bias = False
        if plan.inputs != FLOAT_INPUTS:
            self.max_gemv_tokens, self.min_dense_tokens = MAX_INT8_GEMV_TOKENS, UNLIMITED
        elif library.smelt_has_gemm(self.address):
            self.min_dense_tokens = UNLIMITED

    def set_bias(self, bias: Tensor | None) -> None:
        if bias is not None:
            self.plan.bias, self.plan.bias_type, self.has_bias = bias.data_ptr(), DTYPE_CODES[bias.dtype], True
        elif self.has_bias:
            self.plan.bias, self.plan.bias_type, self.has_bias = None, 0, False


def run(library: Any, task: Task, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., columns] -> [..., rows]."""
    rows, columns = task.rows, task.columns
    if x.shape[-1] != columns:
        raise ValueError(f"the inputs have {x.shape[-1]} columns, the matrix has {columns}")
    x = x.contiguous()
    tokens = x.numel() // columns
    if tokens >= task.min_dense_tokens:
        return _dense_product(library, task, x, bias)
    y = torch.empty((*x.shape[:-1], rows), dtype=x.dtype)
    if tokens:
        task.set_bias(bias)
        threads = threads_for(rows * columns * tokens)
        library.smelt_linear(task.address, x.data_ptr(), y.data_ptr(), tokens, task.max_gemv_tokens, threads)
    return y


def dequantize_rows(library: Any, task: Task, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Dequantize rows of the matrix: [last - first, columns]."""
    out = torch.empty(last - first, task.columns, dtype=dtype)
    plan = LinearPlan.from_buffer_copy(task.plan)
    plan.x_type = DTYPE_CODES[dtype]
    library.smelt_dequantize(ctypes.addressof(plan), first, last, out.data_ptr(), threads_for(out.numel()))
    return out


def _dense_product(library: Any, task: Task, x: Tensor, bias: Tensor | None) -> Tensor:
    """Dequantize and multiply some rows at a time, in float32 unless the CPU has arithmetic of the dtype of x."""
    rows, chunk_rows = task.rows, max(1, MAX_DEQUANTIZED // task.columns)
    dtype = x.dtype if has_bfloat16_arithmetic() else torch.float32
    inputs, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    y = torch.empty((*x.shape[:-1], rows), dtype=x.dtype)
    for first in range(0, rows, chunk_rows):
        last = min(first + chunk_rows, rows)
        bias_slice = None if bias is None else bias[first:last]
        y[..., first:last] = F.linear(inputs, dequantize_rows(library, task, first, last, dtype), bias_slice)
    return y


def threads_for(work: int) -> int:
    """Return the number of threads: one if the work (multiplications) is smaller than the overhead of more."""
    return 1 if work < 1 << 16 else torch.get_num_threads()


def product_key(weight: Format, inputs: ActivationQuant | None) -> str:
    """Return the formats of a product as a string, which a graph can hold."""
    return (
        format_name(weight)
        if inputs is None
        else f"{format_name(weight)} {format_name(inputs.format)} {inputs.clip_ratio}"
    )


def _parse_product_key(key: str, x_scale: Tensor | None) -> tuple[Format, ActivationQuant | None]:
    weight, *inputs = key.split()
    quant = ActivationQuant(get_format(inputs[0]), x_scale, float(inputs[1])) if inputs else None
    return get_format(weight), quant


@torch.library.impl(_definitions, "cpu_linear", "CPU")
def _linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, negative: Tensor | None, divisor: Tensor | None,
    bias: Tensor | None, x_scale: Tensor | None, formats: str,
) -> Tensor:  # fmt: skip
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (zero, negative, divisor, x_scale)]
    key = (formats, codes.data_ptr(), scale.data_ptr(), *addresses, scale.dtype, x.shape[-1], len(codes), x.dtype)
    task = _tasks.get(key)
    if task is None:
        if len(_tasks) >= _MAX_TASKS:
            _tasks.clear()
        tensors = {"codes": codes, "scale": scale, "zero": zero, "negative": negative, "tensor": divisor}
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        weight, quant = _parse_product_key(formats, x_scale)
        plan = make_linear_plan(weight, len(codes), x.shape[-1], present, quant, x.dtype)
        task = _tasks[key] = Task(_library, plan)
    return run(_library, task, x, bias)


@torch.library.register_fake("smelt::cpu_linear", lib=_definitions)
def _shape(x: Tensor, codes: Tensor, *rest: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))
