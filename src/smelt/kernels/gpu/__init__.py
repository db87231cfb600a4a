"""Triton twins of products with a packed matrix, for CUDA devices. Triton is imported only where both are there."""

from __future__ import annotations

import importlib.util

import torch


def register_kernels() -> None:
    """Put the kernels on the list of `smelt.kernels.linear`, where a CUDA device and Triton are there."""
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        importlib.import_module("smelt.kernels.gpu.linear").register_kernels()
