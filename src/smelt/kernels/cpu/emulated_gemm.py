"""Matrix products with an emulated accumulator, compiled. See `source/emulated_gemm.cpp`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.accumulation import Accumulation
from smelt.kernels.cpu.build import load_units
from smelt.kernels.cpu.operator import threads_for
from smelt.numerics.float_format import ROUNDINGS

# Every operation is rounded. Comparisons may be vectorized: nobody reads the floating-point exception flags.
UNITS: dict[str, tuple[str, ...]] = {"emulated_gemm": ("-ffp-contract=off", "-fno-trapping-math")}


class EmulatedGemm(ctypes.Structure):
    """As in `source/emulated_gemm.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "length", "chunk_size", "seed")),
        *((name, ctypes.c_double) for name in ("max_value", "min_positive", "overflow", "infinite")),
        *((name, ctypes.c_int32) for name in ("mantissa_bits", "min_exponent", "subnormals", "rounding", "float32")),
    ]


@lru_cache(maxsize=1)
def library() -> Any:
    """Return the compiled library; None if it cannot be compiled."""
    return load_units(UNITS, _declare)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.smelt_emulated_gemm.argtypes, lib.smelt_emulated_gemm.restype = [ctypes.c_void_p, ctypes.c_int], None
    return lib


def emulated_matmul(a: Tensor, b: Tensor, accumulation: Accumulation) -> Tensor:
    """Multiply a [rows, length] by b [length, columns], both float32, with the contract of the reference."""
    a, b = a.contiguous(), b.contiguous()
    (rows, length), columns = a.shape, b.shape[1]
    out, number_format = torch.empty(rows, columns), accumulation.format
    task = EmulatedGemm(
        a.data_ptr(), b.data_ptr(), out.data_ptr(), rows, columns, length, accumulation.chunk_size, accumulation.seed,
        number_format.max_value, number_format.min_positive, accumulation.overflow, accumulation.infinite,
        number_format.mantissa_bits, number_format.min_exponent, number_format.subnormals,
        ROUNDINGS.index(accumulation.rounding), accumulation.float32_is_exact,
    )  # fmt: skip
    library().smelt_emulated_gemm(ctypes.addressof(task), threads_for(rows * columns * length))
    return out
