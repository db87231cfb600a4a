"""Select the kernel that quantizes a block of columns with error feedback (the inner loop of GPTQ)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smelt.kernels.dispatch import CPU, GPU, has_triton, select_backend


def gptq_block_backend(device: torch.device) -> str:
    """Return the backend that quantizes blocks on a device."""
    return select_backend(
        "GPTQ block",
        (
            (GPU, lambda: device.type == "cuda" and has_triton()),
            (CPU, lambda: device.type == "cpu" and _has_library()),
        ),
    )


def gptq_block_kernel(device: torch.device) -> Callable[..., Any] | None:
    """Return the kernel for a device; None for the plain loop in `compression.quantization.gptq_rounding`."""
    backend = gptq_block_backend(device)
    if backend == GPU:
        from smelt.kernels.gpu.gptq import gptq_block

        return gptq_block
    if backend == CPU:
        from smelt.kernels.cpu.gptq_rounding import gptq_block as compiled

        return compiled
    return None


def _has_library() -> bool:
    from smelt.kernels.cpu.gptq_rounding import library

    return library() is not None
