"""Choose the kernels of integer-only networks by device."""

from __future__ import annotations

from functools import lru_cache

import torch

from smelt.kernels.dispatch import has_triton
from smelt.kernels.integer_interface import IntegerKernels


@lru_cache
def integer_kernels(device_type: str) -> IntegerKernels | None:
    """Return the kernels of a device; None if it has none, or without a compiler or Triton."""
    if device_type == "cpu":
        from smelt.kernels.cpu import integer as cpu

        library = cpu.library()
        return None if library is None else cpu.CpuKernels(library)
    if device_type == "cuda" and has_triton() and torch.cuda.is_available():
        from smelt.kernels.gpu import integer as gpu

        return gpu.GpuKernels()
    return None
