"""Which kernel rounds a block of columns with error feedback: one launch a block on a GPU, none elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch


def block_rounding(device: torch.device) -> Callable[..., Any] | None:
    """The kernel for a device; None: the plain loop in `quantize.feedback`."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from smelt.kernels.gpu.gptq import gptq_block

    return gptq_block
