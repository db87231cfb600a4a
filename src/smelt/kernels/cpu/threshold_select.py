"""Add the residual, compare, compact, compiled: one pass over memory. See `source/compact.cpp`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.cpu.build import load_units
from smelt.kernels.cpu.operator import threads_for

UNITS: dict[str, tuple[str, ...]] = {"compact": ()}


class Compact(ctypes.Structure):
    """As in `source/compact.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "gradient")),
        *((name, ctypes.c_int64) for name in ("elements", "start", "stop")),
        ("found", ctypes.c_void_p),
        ("threshold", ctypes.c_float),
    ]


@lru_cache(maxsize=1)
def library() -> Any:
    """None where it cannot be compiled."""
    return load_units(UNITS, _declared, portable=True)


def _declared(made: ctypes.CDLL) -> ctypes.CDLL:
    made.smelt_compact.argtypes, made.smelt_compact.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int64
    return made


def add_and_select(
    values: Tensor, gradient: Tensor | None, threshold: float, start: int, stop: int, capacity: int | None = None
) -> Tensor:
    """The contract of `smelt.kernels.gpu.threshold_select.add_and_compact`."""
    gradient = None if gradient is None else gradient.float().contiguous()
    elements, address = len(values), 0 if gradient is None else gradient.data_ptr()
    found = torch.empty(max(stop - start, 0), dtype=torch.int32)  # memory that is not written is never real
    task = Compact(values.data_ptr(), address, elements, start, stop, found.data_ptr(), threshold)
    count = library().smelt_compact(ctypes.addressof(task), threads_for(elements))
    indices = found[:count].long().add_(start)
    if capacity is None:
        return indices
    result = torch.full((capacity,), elements)
    result[:count] = indices[:capacity]
    return result
