"""Triton kernels for CUDA devices. Triton is imported only if both are available."""

from __future__ import annotations

import importlib.util

import torch


def register_kernels() -> None:
    """Register the kernels in `smelt.kernels.linear` if a CUDA device and Triton are available."""
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        importlib.import_module("smelt.kernels.gpu.linear").register_kernels()
