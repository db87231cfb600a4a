"""Shared fixtures: the folder with real data and weights, if present."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in background jobs; subprocesses of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


with suppress(ImportError):  # a machine for GPU tests may lack it
    import hypothesis

    hypothesis.settings.register_profile("smelt", deadline=None)  # a busy machine is no failure
    hypothesis.settings.load_profile("smelt")

_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:  # split the cores among the pytest-xdist workers, and the processes that tests start
    _THREADS = max(1, (os.cpu_count() or 1) // _WORKERS)
    os.environ["OMP_NUM_THREADS"] = str(_THREADS)
    torch.set_num_threads(_THREADS)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and weights: SMELT_SHARED, or `shared` beside the checkout."""
    folder = Path(os.environ.get("SMELT_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip("the real data and weights are not here (set SMELT_SHARED to their folder)")
    return folder


@pytest.fixture(autouse=True)
def _onednn() -> Iterator[None]:
    """Enable oneDNN again after a test: on some ARM CPUs PyTorch disables it at the first product in bfloat16, which
    changes the last bits of float32 results in later tests."""
    yield
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
