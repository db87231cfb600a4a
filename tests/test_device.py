"""The device of `auto` is found without torch, and is what torch says."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from smelt import device
from smelt.subprocesses import python_command, python_environment


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    device.has_gpu.cache_clear()
    yield
    device.has_gpu.cache_clear()


def test_it_agrees_with_torch() -> None:
    assert device.has_gpu() == torch.cuda.is_available()
    assert device._torch_has_cuda() == (torch.version.cuda is not None)
    assert device.resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device.resolve_device("cuda:1") == "cuda:1"


@pytest.mark.parametrize(("visible", "found"), [(None, True), ("0", True), ("1,2", True), ("", False), ("-1", False)])
def test_hidden_gpus_do_not_count(visible: str | None, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(device, "_count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.has_gpu() == found


def test_a_driver_that_fails_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: 9

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Broken())
    assert device._count_gpus() == 0


def test_a_server_process_does_not_import_torch() -> None:
    code = "import sys; from smelt.serve.server.settings import ServeConfig; ServeConfig().resolve('x'); "
    command = python_command("-c", code + "sys.exit('torch' in sys.modules)")
    assert subprocess.run(command, env=python_environment(), timeout=300).returncode == 0
