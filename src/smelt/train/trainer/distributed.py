"""The workers meet, and part: when one is lost the others end with one sentence and do not wait for ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as distributed

from smelt.errors import ResourceError

ENDED = "another worker has ended or does not answer"
_told = threading.Lock()  # taken by the first sentence; a process says why it ends once


class LostWorkerError(ResourceError):
    """Another worker is gone; not this one's fault."""


def backend_for(on_gpu: bool) -> str:
    return "cpu:gloo,cuda:nccl" if on_gpu else "gloo"  # what workers agree on lies in the CPU's memory


def init_distributed(device: str, timeout: float) -> torch.device:
    """Meet the workers that torchrun has started; without torchrun this process is the only one."""
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if on_gpu and not torch.cuda.is_available():
        raise ResourceError("there is no GPU here; set device to cpu or auto.")
    place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
    backend = backend_for(on_gpu)
    patience = timedelta(seconds=timeout)
    try:
        if "WORLD_SIZE" in os.environ:
            distributed.init_process_group(backend, timeout=patience)
        else:
            store = distributed.HashStore()
            distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=patience)
    except (ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())[:200]
        raise ResourceError(f"the workers could not find each other ({said}); start them with torchrun.") from error
    return place


@contextmanager
def report_lost_workers(resume_hint: Callable[[], str]) -> Iterator[None]:
    """An error of the connection between workers becomes a sentence."""
    try:
        yield
    except RuntimeError as error:
        if not _tells_lost_worker(error):
            raise
        raise LostWorkerError(f"{ENDED}, so this one stops too; {resume_hint()}") from error


def _tells_lost_worker(error: RuntimeError) -> bool:
    """gloo has no class of its own for its errors, but names its source file in them."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error)


def print_error(sentence: str) -> None:
    """The last words of this process, on standard error, unless it has said some."""
    if _told.acquire(blocking=False):
        print(f"smelt: {' '.join(sentence.split())}", file=sys.stderr, flush=True)


def exit_on_signal(resume_hint: Callable[[], str]) -> None:
    """SIGTERM, which torchrun sends to all when one worker has died, and Ctrl-C end the process with a sentence.

    A thread waits for the signal, since the main one may be inside a collective that never returns.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        while True:
            number = os.read(reading, 1)[0]
            if number in (signal.SIGTERM, signal.SIGINT):
                why = "stopped" if number == signal.SIGINT else f"told to stop, as when {ENDED}"
                print_error(f"{why}; {resume_hint()}")
                os._exit(128 + number)

    threading.Thread(target=wait, daemon=True).start()
