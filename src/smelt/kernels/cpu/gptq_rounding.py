"""The inner loop of GPTQ, compiled, bit-identical to the plain loop over columns. See `source/gptq_rounding.cpp`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.cpu.build import load_units
from smelt.kernels.cpu.operator import threads_for

# Products and sums must be rounded separately to be bit-identical.
UNITS: dict[str, tuple[str, ...]] = {"gptq_rounding": ("-ffp-contract=off",)}


class StridedMatrix(ctypes.Structure):
    """`Matrix` in `source/gptq_rounding.cpp`."""

    _fields_ = [("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("column_stride", ctypes.c_int64)]

    @classmethod
    def of(cls, tensor: Tensor | None) -> StridedMatrix:
        return cls() if tensor is None else cls(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


class GptqBlock(ctypes.Structure):
    """`GptqBlock` in `source/gptq_rounding.cpp`."""

    _fields_ = [
        *((name, StridedMatrix) for name in ("weight", "scale", "zero")),
        ("hinv", ctypes.c_void_p),
        ("hinv_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("codes", "errors")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_float) for name in ("qmax", "default_zero")),
        ("fractional_zero", ctypes.c_int32),
    ]


@lru_cache(maxsize=1)
def library() -> Any:
    """Return the compiled library; None if it cannot be compiled."""
    return load_units(UNITS, _declare)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.smelt_gptq_block.argtypes, lib.smelt_gptq_block.restype = [ctypes.c_void_p, ctypes.c_int], None
    return lib


def gptq_block(
    weight: Tensor, hinv: Tensor, scale: Tensor, zero: Tensor | None, qmax: int, *, default_zero: float = 0.0,
    fractional_zero: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantize the columns of `weight` [rows, columns] in order, without changing it.

    The contract of `smelt.kernels.gpu.gptq.gptq_block`, for any number of columns and any strides.
    """
    rows, columns = weight.shape
    codes, errors = torch.empty(rows, columns, dtype=torch.uint8), torch.empty(rows, columns)
    hinv = hinv if hinv.stride(1) == 1 else hinv.contiguous()
    block = GptqBlock(
        StridedMatrix.of(weight), StridedMatrix.of(scale), StridedMatrix.of(zero), hinv.data_ptr(), hinv.stride(0),
        codes.data_ptr(), errors.data_ptr(), rows, columns, qmax, default_zero, fractional_zero,
    )  # fmt: skip
    library().smelt_gptq_block(ctypes.addressof(block), threads_for(rows * columns * columns))
    return codes, errors
