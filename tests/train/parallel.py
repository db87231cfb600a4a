"""Real gloo ranks for tests, forked from a server process that has already imported torch."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.train.parallel", "tests.train.preload"])
GROUP_TIMEOUT = timedelta(seconds=120)  # a loaded machine is slow
_PATIENCE = 500  # seconds; a deadlock ends sooner, by the group's timeout


def run(size: int, work: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[Any]:
    """Return the result of `work(*arguments)` from each of `size` ranks; an error on one rank is raised here."""
    results = outcomes(size, work, *arguments, backend=backend)
    for _, error in results:
        assert not error, error
    return [result for result, _ in results]


def outcomes(size: int, work: Callable[..., Any], *arguments: Any, backend: str = "gloo") -> list[tuple[Any, str]]:
    """Return each rank's result and the error it ended with."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [_CONTEXT.Pipe(duplex=False) for _ in range(size)]
        start = partial(_worker, size, folder, backend, work, arguments)
        workers = [_CONTEXT.Process(target=start, args=(rank, ends[rank][1]), daemon=True) for rank in range(size)]
        for worker in workers:
            worker.start()
        try:
            results = []
            for receive, _ in ends:
                assert receive.poll(_PATIENCE), "a worker did not end"
                results.append(receive.recv())
            return results
        finally:
            for worker in workers:
                worker.join(timeout=5)
                worker.kill()


def _worker(
    size: int, folder: str, backend: str, work: Callable[..., Any], arguments: tuple[Any, ...], rank: int, end: Any
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        _join_group(size, folder, backend, rank)
        outcome = (work(*arguments), "")
    except Exception as error:
        outcome = (None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    try:  # `end.send` would pass tensors as handles, which nobody can open once this process has ended
        end.send_bytes(pickle.dumps(outcome))
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _join_group(size: int, folder: str, backend: str, rank: int) -> None:
    """Return once every rank is connected: one whose peer ends before that fails to connect."""
    store = distributed.FileStore(str(Path(folder) / "store"), size)
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
    store.set(f"connected {rank}", "")
    store.wait([f"connected {peer}" for peer in range(size)], GROUP_TIMEOUT)
