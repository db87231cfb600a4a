"""The product as an operator of PyTorch, so that `torch.compile` can put it into a graph.

Inside a graph the tensors are arguments like any other; the plan that points to them is found by their addresses. A
plan says nothing that these and the names of the formats do not determine, so none can be stale.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.cpu.plan import DTYPE_CODES, FLOAT_INPUTS, LinearPlan, make_linear_plan
from smelt.kernels.linear import ActivationQuant
from smelt.numerics.catalog import format_name, get_format
from smelt.numerics.format import Format

FEW, FEW_ROUNDED = 4, 1  # tokens up to which a row of the matrix is multiplied with each of them as it is read
DENSE = 16  # tokens from which the matrix is decoded for a dense product, where the library has no way for so many
NEVER = 1 << 62
SLAB = 1 << 22  # values that are decoded at once
_MOST_TASKS = 65536
_tasks: dict[tuple[Any, ...], Task] = {}
_library: Any = None
_definitions = torch.library.Library("smelt", "FRAGMENT")
_definitions.define(
    "cpu_linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? negative, Tensor? divisor, Tensor? bias, "
    "Tensor? x_scale, str kind) -> Tensor"
)


def use(library: Any) -> None:
    """The library that the operator calls."""
    global _library
    _library = library


class Task:
    """A plan with what has to be known at each call."""

    __slots__ = ("address", "biased", "columns", "dense_from", "few", "plan", "rows")

    def __init__(self, library: Any, plan: LinearPlan) -> None:
        self.plan, self.address = plan, ctypes.addressof(plan)
        self.rows, self.columns = plan.rows, plan.columns
        self.few, self.dense_from = FEW, DENSE
        self.biased = False
        if plan.inputs != FLOAT_INPUTS:
            self.few, self.dense_from = FEW_ROUNDED, NEVER
        elif library.smelt_has_gemm(self.address):
            self.dense_from = NEVER

    def set_bias(self, bias: Tensor | None) -> None:
        if bias is not None:
            self.plan.bias, self.plan.bias_type, self.biased = bias.data_ptr(), DTYPE_CODES[bias.dtype], True
        elif self.biased:
            self.plan.bias, self.plan.bias_type, self.biased = None, 0, False


def run(library: Any, task: Task, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., columns] -> [..., rows]."""
    rows, columns = task.rows, task.columns
    if x.shape[-1] != columns:
        raise ValueError(f"the inputs have {x.shape[-1]} columns, the matrix has {columns}")
    x = x.contiguous()
    tokens = x.numel() // columns
    if tokens >= task.dense_from:
        return _by_slabs(library, task, x, bias)
    y = torch.empty((*x.shape[:-1], rows), dtype=x.dtype)
    if tokens:
        task.set_bias(bias)
        threads = threads_for(rows * columns * tokens)
        library.smelt_linear(task.address, x.data_ptr(), y.data_ptr(), tokens, task.few, threads)
    return y


def decoded(library: Any, task: Task, first: int, last: int, dtype: torch.dtype) -> Tensor:
    """Rows of the matrix in full: [last - first, columns]."""
    out = torch.empty(last - first, task.columns, dtype=dtype)
    library.smelt_dequantize(task.address, first, last, out.data_ptr(), threads_for(out.numel()))
    return out


def _by_slabs(library: Any, task: Task, x: Tensor, bias: Tensor | None) -> Tensor:
    """Decode some rows, multiply, decode the next."""
    rows, size = task.rows, max(1, SLAB // task.columns)
    if rows <= size:
        return F.linear(x, decoded(library, task, 0, rows, x.dtype), bias)
    y = torch.empty((*x.shape[:-1], rows), dtype=x.dtype)
    for first in range(0, rows, size):
        last = min(first + size, rows)
        part = None if bias is None else bias[first:last]
        y[..., first:last] = F.linear(x, decoded(library, task, first, last, x.dtype), part)
    return y


def threads_for(work: int) -> int:
    """As PyTorch is set, but one where waking another thread would take longer than the work (multiplications)."""
    return 1 if work < 1 << 16 else torch.get_num_threads()


def kind(weight: Format, inputs: ActivationQuant | None) -> str:
    """The formats of a product in one word, as a graph can hold it."""
    return (
        format_name(weight)
        if inputs is None
        else f"{format_name(weight)} {format_name(inputs.format)} {inputs.clip_ratio}"
    )


def _read_kind(kind: str, x_scale: Tensor | None) -> tuple[Format, ActivationQuant | None]:
    weight, *inputs = kind.split()
    told = ActivationQuant(get_format(inputs[0]), x_scale, float(inputs[1])) if inputs else None
    return get_format(weight), told


@torch.library.impl(_definitions, "cpu_linear", "CPU")
def _linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, negative: Tensor | None, divisor: Tensor | None,
    bias: Tensor | None, x_scale: Tensor | None, kind: str,
) -> Tensor:  # fmt: skip
    places = [0 if tensor is None else tensor.data_ptr() for tensor in (zero, negative, divisor, x_scale)]
    key = (kind, codes.data_ptr(), scale.data_ptr(), *places, scale.dtype, x.shape[-1], len(codes), x.dtype)
    task = _tasks.get(key)
    if task is None:
        if len(_tasks) >= _MOST_TASKS:
            _tasks.clear()
        tensors = {"codes": codes, "scale": scale, "zero": zero, "negative": negative, "tensor": divisor}
        there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        weight, told = _read_kind(kind, x_scale)
        plan = make_linear_plan(weight, len(codes), x.shape[-1], there, told, x.dtype)
        task = _tasks[key] = Task(_library, plan)
    return run(_library, task, x, bias)


@torch.library.register_fake("smelt::cpu_linear", lib=_definitions)
def _shape(x: Tensor, codes: Tensor, *rest: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))
