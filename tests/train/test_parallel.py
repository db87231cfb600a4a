"""The helper that starts ranks: all connect before any works, and what a rank returns outlives its process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from tests.train.parallel import run
from tests.train.synthetic import rank


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def hold_up_the_other_result(folder: Path) -> Tensor:
    """Results are read in the order of ranks: rank 0 returns only after the process of rank 1 has ended."""
    written = folder / "process"
    if rank() == 1:
        (folder / "partial").write_text(str(os.getpid()))
        (folder / "partial").rename(written)
    while rank() == 0 and (not written.exists() or is_running(int(written.read_text()))):
        time.sleep(0.01)
    return torch.full((3,), rank())


def test_tensors_of_a_rank_that_has_ended_can_be_read(tmp_path: Path) -> None:
    first, second = run(2, hold_up_the_other_result, tmp_path)
    assert first.tolist() == [0] * 3 and second.tolist() == [1] * 3


class ConnectSlowly:
    """Work that makes rank 0 slow to connect, and returns whether it has connected."""

    def __init__(self, connected: Path) -> None:
        self._connected = connected

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Change the connecting as soon as a rank receives the work."""
        self.__dict__.update(state)
        connect = distributed.init_process_group

        def connect_slowly(*arguments: Any, **options: Any) -> None:
            connect(*arguments, **options)
            if rank() == 0:
                time.sleep(1)
                self._connected.touch()

        distributed.init_process_group = connect_slowly

    def __call__(self) -> bool:
        return self._connected.exists()


def test_no_rank_works_before_all_are_connected(tmp_path: Path) -> None:
    assert run(2, ConnectSlowly(tmp_path / "connected")) == [True, True]
