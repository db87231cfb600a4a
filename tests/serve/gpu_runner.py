"""A fixture for tests of the GPU runner with linear layers of all kinds: import it, and it applies to every test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.triton_device import DEVICE  # isort: skip  (before anything imports Triton)

from smelt.kernels import linear
from smelt.kernels.gpu import grouped, launch
from smelt.kernels.gpu.linear import EightBit, WeightOnly
from smelt.serve.engine import factory
from smelt.serve.engine.factory import paged_gpu_runner, paged_runner


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the GPU runner also without a CUDA device, with small tiles for the interpreter."""

    def select_runner(resolved: Any, num_blocks: int) -> Any:
        return (paged_gpu_runner if resolved.config.compiled else paged_runner)(resolved, num_blocks)

    monkeypatch.setattr(factory, "paged_runner", select_runner)
    if DEVICE == "cpu":
        monkeypatch.setattr(launch, "gemm_config", lambda batch, matrix, integer: (64, 16, 4, 1))
        monkeypatch.setattr(grouped, "dense_config", lambda tile_size: (64, 64, 4, 1))
        monkeypatch.setattr(linear, "_kernels", {kernel.name: kernel for kernel in (WeightOnly(), EightBit())})
        monkeypatch.setattr(linear, "_unloaded", [])
