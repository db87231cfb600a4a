"""Which kernel rounds a block of columns with error feedback: compiled on x86, Triton on a GPU, none elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from smelt.kernels.linear import REFERENCE, asked_for

CPU, GPU = "cpu-compiled", "gpu-triton"


def block_path(device: torch.device) -> str:
    """The name of what rounds blocks on a device: one of the kernels, or the reference, which `using` can ask for."""
    if asked_for() == REFERENCE.name:
        return REFERENCE.name
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return GPU
    return CPU if device.type == "cpu" and _library() is not None else REFERENCE.name


def block_rounding(device: torch.device) -> Callable[..., Any] | None:
    """The kernel for a device; None: the plain loop in `quantize.feedback`."""
    path = block_path(device)
    if path == GPU:
        from smelt.kernels.gpu.gptq import gptq_block

        return gptq_block
    if path == CPU:
        from smelt.kernels.cpu import feedback

        return partial(feedback.gptq_block, _library())
    return None


@lru_cache(maxsize=1)
def _library() -> Any:
    from smelt.kernels.cpu.build import load_library

    return load_library()
