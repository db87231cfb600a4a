"""Kernels of integer-only networks on CPUs, compiled. See `source/integer.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.conv import ConvShape
from smelt.kernels.cpu.build import NATIVE, load_units
from smelt.kernels.cpu.integer_conv import SIZE_FIELDS, channels_last, convolution_sizes, pack_convolution
from smelt.kernels.cpu.operator import threads_for
from smelt.kernels.integer_interface import (
    INT_TYPES,
    Add,
    Gelu,
    IntegerKernels,
    NormConstants,
    PackedWeight,
    Requantize,
    SoftmaxConstants,
    Step,
    Steps,
    TableLookup,
    mask_rows,
)

UNITS: dict[str, tuple[str, ...]] = {"integer": ()}
LANES = 16  # of a register
_TYPES = {dtype: index for index, dtype in enumerate(INT_TYPES)}
_KINDS = (Requantize, Gelu, TableLookup, Add)
_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Requantize(ctypes.Structure):
    _fields_ = [
        ("multiplier", _POINTER), ("shift", _POINTER), ("channels", _INT64), ("minimum", _INT32), ("maximum", _INT32),
        ("is_high", _INT32),
    ]  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = [
        ("kind", _INT32), ("shift", _INT32), ("requantize", _Requantize), ("q_b", _INT64), ("q_c", _INT64),
        ("q_one", _INT64), ("breakpoints", _POINTER), ("slopes", _POINTER), ("intercepts", _POINTER),
        ("entries", _INT64), ("other", _POINTER), ("other_rows", _INT64), ("other_stride", _INT64),
        ("other_type", _INT32),
    ]  # fmt: skip


class _Steps(ctypes.Structure):
    _fields_ = [("first", _POINTER), ("count", _INT64)]


class _Output(ctypes.Structure):
    _fields_ = [("steps", _Steps), ("data", _POINTER), ("stride", _INT64), ("type", _INT32)]


class _Matrices(ctypes.Structure):
    _fields_ = [("data", _POINTER), ("outer", _INT64), ("inner", _INT64), ("row", _INT64)]


class _Softmax(ctypes.Structure):
    _fields_ = [
        *((name, _INT64) for name in ("levels", "q_ln2", "q_b", "q_c")),
        *((name, _INT32) for name in ("reciprocal_bits", "max_halvings", "lift", "drop")),
    ]


class _Norm(ctypes.Structure):
    _fields_ = [
        ("weight", _POINTER), ("bias", _POINTER), ("length", _INT64), ("epsilon", _INT64),
        *((name, _INT32) for name in ("shift", "reciprocal_bits", "output_bits", "centered")),
    ]  # fmt: skip


class _Panels(ctypes.Structure):
    _fields_ = [("bytes", _POINTER), ("offset", _POINTER), ("channels", _INT64), ("columns", _INT64)]


class _Linear(ctypes.Structure):
    _fields_ = [
        ("x", _POINTER), ("x_stride", _INT64), ("rows", _INT64), ("weight", _Panels), ("bias", _POINTER),
        ("out", _Output), ("is_unsigned", _INT32),
    ]  # fmt: skip


class _Matmul(ctypes.Structure):
    _fields_ = [
        ("a", _Matrices), ("b", _Matrices),
        *((name, _INT64) for name in ("batch", "inner", "rows", "channels", "columns", "out_outer", "out_inner")),
        ("out", _Output), ("transposed", _INT32),
    ]  # fmt: skip


class _Attention(ctypes.Structure):
    _fields_ = [
        ("query", _Matrices), ("key", _Matrices), ("value", _Matrices),
        *((name, _INT64) for name in ("batch", "inner", "queries", "keys", "head_dim", "out_outer", "out_inner")),
        ("score_steps", _Steps), ("softmax", _Softmax), ("mask", _POINTER), ("rows_per_mask", _INT64), ("out", _Output),
    ]  # fmt: skip


class _SoftmaxTask(ctypes.Structure):
    _fields_ = [
        ("x", _POINTER), ("type", _INT32), ("rows", _INT64), ("length", _INT64), ("steps", _Steps),
        ("softmax", _Softmax), ("mask", _POINTER), ("rows_per_mask", _INT64), ("out", _Output),
    ]  # fmt: skip


class _NormTask(ctypes.Structure):
    _fields_ = [
        ("x", _POINTER), ("type", _INT32), ("rows", _INT64), ("steps", _Steps), ("norm", _Norm), ("outputs", _INT64),
        ("out", _Output * 2),
    ]  # fmt: skip


class _Map(ctypes.Structure):
    _fields_ = [
        ("x", _POINTER), ("type", _INT32), ("rows", _INT64), ("channels", _INT64), ("out", _Output),
    ]  # fmt: skip


class _Convolution(ctypes.Structure):
    _fields_ = [
        ("x", _POINTER), *SIZE_FIELDS, ("weight", _POINTER), ("offset", _POINTER), ("bias", _POINTER), ("out", _Output),
        ("is_unsigned", _INT32),
    ]  # fmt: skip


_STRUCTURES = (_Step, _Linear, _Matmul, _Attention, _SoftmaxTask, _NormTask, _Map, _Convolution)


@lru_cache
def library(machine: str = NATIVE) -> Any:
    """Return the compiled library; None if it cannot be compiled."""
    return load_units(UNITS, _declare, machine)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    for name in ("linear", "convolution", "matmul", "attention", "softmax", "norm", "map"):
        function = getattr(lib, f"smelt_integer_{name}")
        function.argtypes, function.restype = [_POINTER, ctypes.c_int], None
    lib.smelt_integer_pack.argtypes = [_POINTER, _INT64, _INT64, _INT32, _POINTER, _POINTER]
    lib.smelt_integer_pack_depthwise.argtypes = [_POINTER, _INT64, _INT64, _INT64, _INT32, _POINTER, _POINTER]
    lib.smelt_integer_pack.restype = lib.smelt_integer_pack_depthwise.restype = None
    lib.smelt_integer_depthwise_size.argtypes = [_INT64] * 3
    lib.smelt_integer_depthwise_size.restype = _INT64
    lib.smelt_integer_packed_size.argtypes, lib.smelt_integer_packed_size.restype = [_INT64, _INT64], _INT64
    lib.smelt_integer_sizes.argtypes, lib.smelt_integer_sizes.restype = [ctypes.c_int], _INT64
    sizes = [lib.smelt_integer_sizes(index) for index in range(len(_STRUCTURES))]
    if sizes != [ctypes.sizeof(structure) for structure in _STRUCTURES]:
        raise OSError("the compiled library has a different layout of its tasks")
    return lib


class CpuKernels(IntegerKernels):
    """SIMD kernels with the int8 dot product of the CPU, where it has one."""

    name = "cpu"
    has_convolutions = True

    def __init__(self, lib: Any) -> None:
        self.library = lib

    def pack(self, weight: Tensor, is_unsigned: bool = False) -> PackedWeight:
        shape = ConvShape(weight.shape[1], len(weight), (1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1, 1)
        return pack_convolution(self.library, weight, shape, is_unsigned)

    def linear(
        self, x: Tensor, weight: PackedWeight, bias: Tensor | None, steps: Steps, dtype: torch.dtype,
        operands: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        x, offset = x.contiguous(), weight.offset
        assert offset is not None
        out = torch.empty((*x.shape[:-1], weight.channels), dtype=dtype)
        rows = prod(x.shape[:-1])
        output, kept = _output(out, weight.channels, steps, operands)
        panels = _Panels(weight.data.data_ptr(), offset.data_ptr(), weight.channels, weight.columns)
        task = _Linear(x.data_ptr(), weight.columns, rows, panels, _address(bias), output, weight.is_unsigned)
        self._run("linear", task, out.numel() * weight.columns)
        del kept
        return out

    def pack_convolution(self, weight: Tensor, shape: ConvShape, is_unsigned: bool) -> PackedWeight:
        return pack_convolution(self.library, weight, shape, is_unsigned)

    def convolve(
        self, x: Tensor, weight: PackedWeight, shape: ConvShape, bias: Tensor | None, steps: Steps, dtype: torch.dtype,
        operands: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        x, offset = channels_last(x), weight.offset
        assert offset is not None
        if x.shape[-1] != shape.in_channels:
            raise ValueError(f"the inputs have {x.shape[-1]} channels, the convolution has {shape.in_channels}")
        sizes = convolution_sizes(x, shape)
        out = torch.empty((len(x), *sizes[-2:][4 - x.dim() :], shape.out_channels), dtype=dtype)
        output, kept = _output(out, shape.out_channels, steps, [channels_last(operand) for operand in operands])
        task = _Convolution(
            x.data_ptr(), *sizes, weight.data.data_ptr(), offset.data_ptr(), _address(bias), output, weight.is_unsigned
        )
        self._run("convolution", task, out.numel() * shape.columns)
        del kept
        return out.movedim(-1, 1)

    def matmul(self, a: Tensor, b: Tensor, transpose_b: bool, steps: Steps, dtype: torch.dtype) -> Tensor:
        a, b = _rows_contiguous(a), _rows_contiguous(b)
        (outer, inner, rows, columns), channels = a.shape, b.shape[2 if transpose_b else 3]
        out = torch.empty(outer, inner, rows, channels, dtype=dtype)
        output, kept = _output(out, channels, steps, ())
        task = _Matmul(
            _matrices(a), _matrices(b), outer * inner, inner, rows, channels, columns, inner * rows * channels,
            rows * channels, output, transpose_b,
        )  # fmt: skip
        self._run("matmul", task, out.numel() * columns)
        del kept
        return out

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, score_steps: Steps,
        softmax: SoftmaxConstants, steps: Steps, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        query, key, value = (_rows_contiguous(tensor) for tensor in (query, key, value))
        (batch, heads, queries, head_dim), keys = query.shape, key.shape[2]
        mask_bytes, rows_per_mask = mask_rows(mask, (batch, heads, queries, keys), query.device)
        out = torch.empty(batch, queries, heads, head_dim, dtype=dtype)
        output, kept = _output(out, heads * head_dim, steps, ())
        scores, kept_scores = _native_steps(score_steps, ())
        task = _Attention(
            _matrices(query), _matrices(key), _matrices(value), batch * heads, heads, queries, keys, head_dim,
            queries * heads * head_dim, head_dim, scores, _native_softmax(softmax), mask_bytes.data_ptr(),
            rows_per_mask, output,
        )  # fmt: skip
        self._run("attention", task, batch * heads * queries * keys * head_dim)
        del kept, kept_scores
        return out.transpose(1, 2)

    def softmax(
        self, x: Tensor, mask: Tensor | None, steps: Steps, softmax: SoftmaxConstants, dtype: torch.dtype
    ) -> Tensor:
        x = x.contiguous()
        mask_bytes, rows_per_mask = mask_rows(mask, tuple(x.shape), x.device)
        out, length = torch.empty(x.shape, dtype=dtype), x.shape[-1]
        output, kept = _output(out, length, Steps(), ())
        before, kept_before = _native_steps(steps, ())
        task = _SoftmaxTask(
            x.data_ptr(), _TYPES[x.dtype], prod(x.shape[:-1]), length, before, _native_softmax(softmax),
            mask_bytes.data_ptr(), rows_per_mask, output,
        )  # fmt: skip
        self._run("softmax", task, 16 * x.numel())
        del kept, kept_before
        return out

    def norm(
        self, x: Tensor, steps: Steps, norm: NormConstants, outputs: Sequence[tuple[Steps, torch.dtype]],
        operands: Sequence[Tensor] = (),
    ) -> list[Tensor]:  # fmt: skip
        x, length = x.contiguous(), x.shape[-1]
        results = [torch.empty(x.shape, dtype=dtype) for _, dtype in outputs]
        kept = [_output(out, length, after, ()) for out, (after, _) in zip(results, outputs, strict=True)]
        before, kept_before = _native_steps(steps, operands)
        constants = _Norm(
            norm.weight.data_ptr(), _address(norm.bias), length, norm.epsilon, norm.shift, norm.reciprocal_bits,
            norm.output_bits, norm.bias is not None,
        )  # fmt: skip
        task = _NormTask(
            x.data_ptr(), _TYPES[x.dtype], prod(x.shape[:-1]), before, constants, len(results),
            (_Output * 2)(*(output for output, _ in kept)),
        )  # fmt: skip
        self._run("norm", task, 16 * x.numel())
        del kept, kept_before
        return results

    def map(self, x: Tensor, steps: Steps, dtype: torch.dtype, operands: Sequence[Tensor] = ()) -> Tensor:
        x = x.contiguous()
        out, channels = torch.empty(x.shape, dtype=dtype), x.shape[-1]
        output, kept = _output(out, channels, steps, operands)
        task = _Map(x.data_ptr(), _TYPES[x.dtype], prod(x.shape[:-1]), channels, output)
        self._run("map", task, 8 * x.numel())
        del kept
        return out

    def _run(self, name: str, task: ctypes.Structure, work: int) -> None:
        if work:
            getattr(self.library, f"smelt_integer_{name}")(ctypes.addressof(task), threads_for(work))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _matrices(x: Tensor) -> _Matrices:
    return _Matrices(x.data_ptr(), *x.stride()[:3])


def _native_softmax(softmax: SoftmaxConstants) -> _Softmax:
    return _Softmax(
        softmax.levels, softmax.q_ln2, softmax.q_b, softmax.q_c, softmax.reciprocal_bits, softmax.max_halvings,
        softmax.lift, softmax.drop,
    )  # fmt: skip


def _output(out: Tensor, stride: int, steps: Steps, operands: Sequence[Tensor]) -> tuple[_Output, Any]:
    native, kept = _native_steps(steps, operands)
    return _Output(native, out.data_ptr(), stride, _TYPES[out.dtype]), kept


def _native_steps(steps: Steps, operands: Sequence[Tensor]) -> tuple[_Steps, Any]:
    """Return steps and what must live as long as they are used."""
    if "cpu" not in steps.prepared:
        tensors: list[Tensor] = []
        array = (_Step * len(steps.steps))(*(_native_step(step, tensors) for step in steps.steps))
        steps.prepared["cpu"] = array, tensors
    array, _ = steps.prepared["cpu"]
    adds = [index for index, step in enumerate(steps.steps) if isinstance(step, Add)]
    if len(adds) != len(operands):
        raise ValueError(f"the steps add {len(adds)} operands, not {len(operands)}")
    operands = [operand.contiguous() for operand in operands]
    if adds:
        array = type(array).from_buffer_copy(array)  # calls of several threads must not share operands
        for index, operand in zip(adds, operands, strict=True):
            channels = operand.shape[-1]
            array[index].other, array[index].other_rows = operand.data_ptr(), operand.numel() // channels
            array[index].other_stride, array[index].other_type = channels, _TYPES[operand.dtype]
    return _Steps(ctypes.addressof(array), len(array)), (array, operands)


def _native_step(step: Step, tensors: list[Tensor]) -> _Step:
    def pointer(tensor: Tensor) -> int:
        tensors.append(F.pad(tensor.to(torch.int32), (0, LANES)))  # kernels read whole registers
        return tensors[-1].data_ptr()

    native = _Step(kind=_KINDS.index(type(step)))
    requantize = step if isinstance(step, Requantize) else step.requantize if isinstance(step, Add) else None
    if requantize is not None:
        multiplier, shift = torch.broadcast_tensors(requantize.multiplier.flatten(), requantize.shift.flatten())
        native.requantize = _Requantize(
            pointer(multiplier),
            pointer(shift),
            multiplier.numel(),
            requantize.minimum,
            requantize.maximum,
            bool((shift >= 32).all()),
        )
    if isinstance(step, Gelu):
        native.q_b, native.q_c, native.q_one, native.shift = step.q_b, step.q_c, step.q_one, step.shift
    if isinstance(step, TableLookup):
        native.breakpoints, native.slopes = pointer(step.breakpoints), pointer(step.slopes)
        native.intercepts, native.entries = pointer(step.intercepts), step.breakpoints.numel()
    return native
