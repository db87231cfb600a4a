"""Shared by the benchmarks of quantization-aware training: cells of a grid are trained in processes, side by side.

A script calls `run_cells` for its cells, or `Grid` for those that have no row yet, and `train_cells` where it is
started with `--cells`; where every cell is a process of its own that is started with `--cell`, it calls `run_cell`.

On a machine that is lent for a time, set SMELT_BENCHMARK_DEADLINE to a Unix time: no cell starts after it. Where many
processes share a GPU, set SMELT_BENCHMARK_GPU_FRACTION to the most of its memory that each of them may reserve: freed
memory that PyTorch keeps is used again instead of growing until others have none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from common import previous_rows, write

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import Batch
from smelt.files import write_atomically
from smelt.models.model import Model

Row = dict[str, Any]
_MARK = "ROW"
_FACTS = ("steps", "final_loss", "loss_curve", "mean_alpha_curve", "conversion_error", "validation_accuracy")


def add_options(parser: argparse.ArgumentParser, name: str, seeds: Sequence[int], jobs: int) -> None:
    """Add the options that all grids have."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds))
    parser.add_argument("--jobs", type=int, default=jobs, help="cells that are trained at the same time")
    parser.add_argument("--folder", type=Path, help="for unquantized networks and data; kept if given")
    parser.add_argument("--name", default=name, help="of the results file")
    parser.add_argument("--cells", help=argparse.SUPPRESS)  # train these in this process


@contextmanager
def work_folder(options: argparse.Namespace) -> Iterator[None]:
    """Make `--folder`, or a temporary one that is removed at the end."""
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        options.folder.mkdir(parents=True, exist_ok=True)
        yield


def flags(options: argparse.Namespace, *names: str) -> list[str]:
    """Return the flags that give a script the same options, `device` and `folder` among them, in another process."""
    values = {name: getattr(options, name) for name in ("device", "folder", *names)}
    spelled = {f"--{name.replace('_', '-')}": value for name, value in values.items() if value is not False}
    return [part for flag, value in spelled.items() for part in ([flag] if value is True else [flag, str(value)])]


@dataclass
class Grid:
    """The rows of a script's results file, which grows as the cells without a row are computed.

    `flags` are those of the processes, `key` tells the cell of a row, `text` writes the page of the results.
    """

    script: str
    options: argparse.Namespace
    flags: Sequence[str]
    key: Callable[[Row], Hashable]
    text: Callable[[list[Row], argparse.Namespace], str]
    rows: list[Row] = field(init=False)

    def __post_init__(self) -> None:
        self.rows = previous_rows(self.options.name, self.options.resume and not self.options.smoke)

    def missing(self, cells: Sequence[Row]) -> list[Row]:
        """Return the cells that have no row."""
        done = {self.key(row) for row in self.rows}
        return [cell for cell in cells if self.key(cell) not in done]

    def prepare(self, cells: Sequence[Row]) -> None:
        """Compute what other cells start from, such as a float network; it may be lost while its row is kept."""
        for row in run_cells(self.script, [[cell] for cell in cells], self.options.jobs, self.flags):
            self._add(row)

    def run(self, cells: Sequence[Row], *, own_process: bool = False) -> None:
        """Compute cells and write the results after each; show them only, at the end, if this is a smoke run.

        Each of the `--jobs` processes takes its share of the cells, unless every cell gets a process of its own.
        """
        jobs = len(cells) if own_process else self.options.jobs
        parts = [part for index in range(jobs) if (part := cells[index::jobs])]
        for row in run_cells(self.script, parts, self.options.jobs, self.flags):
            self._add(row)
            if not self.options.smoke:
                self.write()
        if self.options.smoke and cells:
            self.write()

    def time(self, cells: Sequence[Row]) -> None:
        """Time cells that have a row, alone in one process, and add what they return to their rows."""
        known = {self.key(row) for row in self.rows}
        for row in run_cells(self.script, [[cell for cell in cells if self.key(cell) in known]], 1, self.flags):
            self.rows = [{**other, **row} if self.key(other) == self.key(row) else other for other in self.rows]
            self.write()

    def write(self) -> None:
        """Write the results; only show those of a smoke run."""
        if self.options.smoke:
            print(self.text(self.rows, self.options))
        else:
            write(self.options.name, self.rows, self.text(self.rows, self.options))

    def _add(self, row: Row) -> None:
        self.rows = [*(other for other in self.rows if self.key(other) != self.key(row)), row]


def run_cells(script: str, parts: Sequence[Sequence[Row]], jobs: int, flags: Sequence[str]) -> Iterator[Row]:
    """Run a script with `--cells` in a process for each part, `jobs` at a time; yield rows as they are finished.

    A cell that fails stops no other one: its error is raised after the last row.
    """
    finished: Queue[Row | str] = Queue()

    def run(part: Sequence[Row]) -> None:
        if is_too_late():
            for cell in part:
                finished.put(f"{cell} was not started: the deadline is over")
            return
        command = [sys.executable, script, "--cells", json.dumps(part), *flags]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert process.stdout is not None
            done = 0
            for line in process.stdout:
                if line.startswith(_MARK):
                    finished.put(json.loads(line[len(_MARK) :]))
                    done += 1
            process.wait()
            errors.seek(0)
            for cell in part[done:]:
                finished.put(f"{cell} failed:\n{errors.read()[-3000:] or 'as the cell before it'}")

    failures = []
    with ThreadPoolExecutor(jobs) as pool:
        for part in parts:
            pool.submit(run, part)
        for _ in range(sum(map(len, parts))):
            row = finished.get()
            if isinstance(row, str):
                failures.append(row)
                print(row, flush=True)
                continue
            print({key: value for key, value in row.items() if "curve" not in key}, flush=True)
            yield row
    if failures:
        raise SystemExit(f"{len(failures)} of {sum(map(len, parts))} cells failed; the first one: {failures[0]}")


def run_cell(script: str, cell: str, flags: Sequence[str], folder: Path) -> Row:
    """Run a script with `--cell` in a process of its own; return its row, or what it wrote to standard error.

    A finished row is kept in the folder and is not computed again.
    """
    kept = folder / "rows" / f"{re.sub('[^a-z0-9]+', '-', cell.lower()).strip('-')}.json"
    if kept.exists():
        row: Row = json.loads(kept.read_text())
        return row
    if is_too_late():
        return {"failed": "not started: the deadline is over"}
    command = [sys.executable, script, "--cell", cell, *flags]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [line for line in process.stdout.splitlines() if line.startswith(_MARK)]
    if not found:
        print(f"{cell} failed:\n{process.stderr[-3000:]}", flush=True)
        return {"failed": process.stderr[-3000:]}
    row = json.loads(found[0][len(_MARK) :])
    write_atomically(kept, lambda path: path.write_text(json.dumps(row)))
    print({key: value for key, value in row.items() if key != "results" and "curve" not in key}, flush=True)
    return row


def print_row(row: Row) -> None:
    """Print a row for the process that started this one."""
    print(_MARK + json.dumps(row), flush=True)


def train_cells(cells: str, train: Callable[[Row], Row]) -> None:
    """Train the cells of this process and print a row for each."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(float(os.environ.get("SMELT_BENCHMARK_GPU_FRACTION", "1")))
    for cell in json.loads(cells):
        if is_too_late():
            print(_MARK + json.dumps(f"{cell} was not started: the deadline is over"), flush=True)
            continue
        try:
            print_row(train(cell))
        except Exception:
            print(_MARK + json.dumps(f"{cell} failed:\n{traceback.format_exc()[-3000:]}"), flush=True)


def is_too_late() -> bool:
    """Return whether SMELT_BENCHMARK_DEADLINE is over."""
    return time.time() > float(os.environ.get("SMELT_BENCHMARK_DEADLINE", "inf"))


def apply_step(step: Row, model: Model, batches: Sequence[Batch], seed: int) -> Row:
    """Apply a step of a recipe to the model; return the facts that the tables use."""
    with tempfile.TemporaryDirectory() as folder:
        facts = METHODS.build(step).apply(model, MethodContext(batches=batches, seed=seed, folder=Path(folder)))
    return {key: facts[key] for key in _FACTS if key in facts}


def mean_and_seeds(values: Sequence[float]) -> list[str]:
    """Return two cells of a table: the mean, and the value of each seed."""
    return [f"{statistics.mean(values):.2f}", ", ".join(f"{value:.2f}" for value in values)]
