"""The inner loop of GPTQ, compiled: bit for bit the plain loop over columns. See `source/feedback.cpp`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.cpu.build import load_units
from smelt.kernels.cpu.operator import threads_for

# It must give the bits of separate products and sums.
UNITS: dict[str, tuple[str, ...]] = {"feedback": ("-ffp-contract=off",)}


class Matrix(ctypes.Structure):
    """As in `source/feedback.cpp`."""

    _fields_ = [("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("column_stride", ctypes.c_int64)]

    @classmethod
    def of(cls, tensor: Tensor | None) -> Matrix:
        return cls() if tensor is None else cls(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


class Feedback(ctypes.Structure):
    """As in `source/feedback.cpp`."""

    _fields_ = [
        *((name, Matrix) for name in ("weight", "scale", "zero")),
        ("factor", ctypes.c_void_p),
        ("factor_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("codes", "errors")),
        *((name, ctypes.c_int64) for name in ("rows", "columns")),
        *((name, ctypes.c_float) for name in ("top", "middle")),
        ("fraction", ctypes.c_int32),
    ]


@lru_cache(maxsize=1)
def library() -> Any:
    """None where it cannot be compiled."""
    return load_units(UNITS, _declared, portable=True)


def _declared(made: ctypes.CDLL) -> ctypes.CDLL:
    made.smelt_feedback.argtypes, made.smelt_feedback.restype = [ctypes.c_void_p, ctypes.c_int], None
    return made


def gptq_block(
    weight: Tensor, factor: Tensor, scale: Tensor, zero: Tensor | None, qmax: int, *, default_zero: float = 0.0,
    fractional_zero: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Round the columns of `weight` [rows, columns] in order; the block itself is left as it was.

    The contract of `smelt.kernels.gpu.gptq.gptq_block`, for any number of columns and any strides.
    """
    rows, columns = weight.shape
    codes, errors = torch.empty(rows, columns, dtype=torch.uint8), torch.empty(rows, columns)
    factor = factor if factor.stride(1) == 1 else factor.contiguous()
    task = Feedback(
        Matrix.of(weight), Matrix.of(scale), Matrix.of(zero), factor.data_ptr(), factor.stride(0), codes.data_ptr(),
        errors.data_ptr(), rows, columns, qmax, default_zero, fractional_zero,
    )  # fmt: skip
    library().smelt_feedback(ctypes.addressof(task), threads_for(rows * columns * columns))
    return codes, errors
