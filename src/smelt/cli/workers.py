"""`--workers N`: start a command once per rank on this machine, as torchrun would.

The exit code is that of the rank that failed first; torchrun replaces it by 1 and prints a traceback of its own. Under
torchrun this module does nothing: the command is a rank already.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Queue
from typing import IO, Annotated

import typer

from smelt.cli.output import RUN
from smelt.errors import ConfigError
from smelt.subprocesses import python_command, python_environment

WorkersOption = Annotated[
    int,
    typer.Option(
        "--workers", min=1, max=1024, help="Ranks to start on this machine; torchrun works too.", rich_help_panel=RUN
    ),
]

_GRACE = 10.0  # seconds for the other ranks to notice that one is gone, and again after SIGTERM


def in_worker() -> bool:
    """Return whether this process is one of several ranks, started by torchrun or by `run_workers`."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def run_workers(arguments: Sequence[str], workers: int) -> int:
    """Run `smelt *arguments` in every rank and wait; return 0, or the code of the rank that failed first."""
    if workers < 2:
        raise ConfigError("this takes several ranks: give --workers 2 or more, or start it with torchrun.")
    environment = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers)),
        **python_environment(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
    }
    command = python_command("-m", "smelt.cli.main", *arguments)
    forward = _Forwarder()
    ranks = [_start(command, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(workers)]
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        threads = [forward.start(rank.stderr) for rank in ranks if rank.stderr is not None]
        code = _wait_for_first_failure(ranks)
    finally:
        signal.signal(signal.SIGTERM, previous)
        _end(ranks)
    for thread in threads:
        thread.join(_GRACE)
    return code


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def _wait_for_first_failure(ranks: list[subprocess.Popen[str]]) -> int:
    """Return the code of the rank that ended first without success; 0 when all have succeeded."""
    ended: Queue[int] = Queue()
    for rank in ranks:  # a thread each: ranks that lose a peer end so soon after it that polling could mix them up
        threading.Thread(target=lambda rank=rank: ended.put(rank.wait()), daemon=True).start()
    for _ in ranks:
        if failed := ended.get():
            return failed if failed > 0 else 128 - failed
    return 0


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    """Let the remaining ranks end by themselves, then ask, then kill them."""
    for ask in (lambda rank: None, subprocess.Popen.terminate, subprocess.Popen.kill):
        running = [rank for rank in ranks if rank.poll() is None]
        for rank in running:
            ask(rank)
        deadline = time.monotonic() + _GRACE
        for rank in running:
            with suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.0, deadline - time.monotonic()))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Forwarder:
    """Copies the ranks' standard error; an error sentence that several of them print appears once."""

    def __init__(self) -> None:
        self._printed: set[str] = set()
        self._lock = threading.Lock()

    def start(self, stream: IO[str]) -> threading.Thread:
        thread = threading.Thread(target=self._copy, args=(stream,), daemon=True)
        thread.start()
        return thread

    def _copy(self, stream: IO[str]) -> None:
        for line in stream:
            with self._lock:
                if line not in self._printed:
                    print(line, end="", file=sys.stderr, flush=True)
                if line.startswith("smelt: "):
                    self._printed.add(line)
