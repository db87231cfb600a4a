"""Add a gradient and select above a threshold, compiled: one pass over memory. See `source/threshold_select.cpp`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.cpu.build import load_units
from smelt.kernels.cpu.operator import threads_for

UNITS: dict[str, tuple[str, ...]] = {"threshold_select": ()}


class ThresholdSelect(ctypes.Structure):
    """As in `source/threshold_select.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "gradient")),
        *((name, ctypes.c_int64) for name in ("elements", "start", "stop")),
        ("indices", ctypes.c_void_p),
        ("threshold", ctypes.c_float),
    ]


@lru_cache(maxsize=1)
def library() -> Any:
    """Return the compiled library; None if it cannot be compiled."""
    return load_units(UNITS, _declare)


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.smelt_threshold_select.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.smelt_threshold_select.restype = ctypes.c_int64
    return lib


def add_and_select(
    values: Tensor, gradient: Tensor | None, threshold: float, start: int, stop: int, capacity: int | None = None
) -> Tensor:
    """Add and select with the contract of `smelt.kernels.gpu.threshold_select.add_and_select`."""
    gradient = None if gradient is None else gradient.float().contiguous()
    elements, address = len(values), 0 if gradient is None else gradient.data_ptr()
    buffer = torch.empty(max(stop - start, 0), dtype=torch.int32)  # pages that are never written take no memory
    task = ThresholdSelect(values.data_ptr(), address, elements, start, stop, buffer.data_ptr(), threshold)
    count = library().smelt_threshold_select(ctypes.addressof(task), threads_for(elements))
    indices = buffer[:count].long().add_(start)
    if capacity is None:
        return indices
    padded = torch.full((capacity,), elements)
    padded[:count] = indices[:capacity]
    return padded
