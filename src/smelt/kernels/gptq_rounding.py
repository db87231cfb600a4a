"""Which kernel rounds a block of columns with error feedback: compiled on a CPU, Triton on a GPU, else none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from smelt.kernels.linear import REFERENCE, forced_backend

CPU, GPU = "cpu-compiled", "gpu-triton"


def gptq_block_backend(device: torch.device) -> str:
    """The name of what rounds blocks on a device: one of the kernels, or the reference, which `using` can ask for."""
    if forced_backend() == REFERENCE.name:
        return REFERENCE.name
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return GPU
    if device.type == "cpu":
        from smelt.kernels.cpu.gptq_rounding import library

        return CPU if library() is not None else REFERENCE.name
    return REFERENCE.name


def gptq_block_kernel(device: torch.device) -> Callable[..., Any] | None:
    """The kernel for a device; None: the plain loop in `quantize.feedback`."""
    path = gptq_block_backend(device)
    if path == GPU:
        from smelt.kernels.gpu.gptq import gptq_block

        return gptq_block
    if path == CPU:
        from smelt.kernels.cpu.gptq_rounding import gptq_block as compiled

        return compiled
    return None
