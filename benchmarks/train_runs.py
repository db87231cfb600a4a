"""Shared by the training benchmarks: options, and four ranks that yield each cell as it is done."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import shared

WORKERS = 4
Cell = dict[str, Any]


def words(text: str) -> list[str]:
    """Split a comma-separated option."""
    return text.split(",")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every resumable benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=lambda text: list(map(int, words(text))), default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after this many")
    parser.add_argument("--text", action="store_true", help="run nothing, rewrite the tables")
    return parser


def run_cells(cells: list[Cell]) -> Iterator[Cell]:
    """Run in four processes on this machine, connected by loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    yield from run_workers(cells, "127.0.0.1", port, lambda rank: [], {"GLOO_SOCKET_IFNAME": "lo"})


def run_workers(
    cells: list[Cell],
    address: str,
    port: int,
    prefix: Callable[[int], list[str]],
    more: dict[str, str],
    ready: Callable[[list[int]], None] = lambda pids: None,
) -> Iterator[Cell]:
    """Yield each cell as it is done.

    `prefix`: arguments before a rank's command. `ready` is called with the process ids once all are started; after it
    each one is sent an empty line, which a prefix may wait for.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cells.json"
        file.write_text(json.dumps(cells))
        command = [sys.executable, str(Path(__file__).with_name("train_worker.py")), str(file)]
        common = {"WORLD_SIZE": str(WORKERS), "MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        processes: list[subprocess.Popen[str]] = []
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no worker is left behind
        try:
            for rank in range(WORKERS):
                environment = {**os.environ, **common, **more, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                command_line = [*prefix(rank), *command]
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": out, "text": True}
                # a session each, so that Linux schedules the ranks fairly
                processes.append(subprocess.Popen(command_line, env=environment, start_new_session=True, **pipes))
            ready([process.pid for process in processes])
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.close()
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                yield json.loads(line)
            for process in processes:
                if process.wait():
                    raise SystemExit("a rank failed; see its output above")
        finally:
            for process in processes:
                process.kill()
                process.wait()


def wikitext2(folder: Path, megabytes: float) -> tuple[Path, Path]:
    """Write the beginning of WikiText-2's training and validation splits as text files."""
    paths = []
    for part, size in (("train", int(megabytes * 1e6)), ("valid", 200_000)):
        with gzip.open(shared() / "data" / "wikitext2" / f"{part}.txt.gz", "rt", encoding="utf-8") as file:
            text = file.read(size)
        path = folder / f"{part}.txt"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths[0], paths[1]


def cifar10(folder: Path) -> Path:
    """Write CIFAR-10 as pixels into one file, if it is not there; `shared` holds JPEG copies, which Pillow reads."""
    path = folder / "cifar10.npz"
    if path.exists():
        return path
    arrays = {}
    for part in ("train", "test"):
        with np.load(shared() / "data" / "cifar10_jpeg" / f"{part}.npz", allow_pickle=False) as packed:
            blob, offsets = packed["blob"].tobytes(), packed["offset"].tolist()
            arrays[f"y_{part}"] = packed["label"]
        images = [_pixels(blob[start:stop]) for start, stop in pairwise(offsets)]
        arrays[f"x_{part}"] = np.stack(images)  # [images, height, width, channels]
    np.savez(path, **arrays)
    return path


def _pixels(jpeg: bytes) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError as error:
        raise SystemExit("CIFAR-10 is stored as JPEG; pip install pillow to read it") from error
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))
