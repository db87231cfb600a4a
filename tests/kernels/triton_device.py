"""Pick the device for Triton kernel tests: CUDA, or Triton's interpreter on CPU."""

from __future__ import annotations

import importlib.util
import os
import sys

import numpy
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    if tuple(int(part) for part in numpy.__version__.split(".")[:2]) >= (2, 4):
        pytest.skip("Triton's interpreter needs numpy below 2.4", allow_module_level=True)
    if "triton" in sys.modules:
        pytest.skip("Triton was imported before its interpreter was asked for", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton itself and the kernels are imported

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter has no native bfloat16
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 6e-4}  # rounding of the result, and of the dequantized matrix


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error: norm of the difference over the norm of `expected`."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
