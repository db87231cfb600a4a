"""One rank of the training benchmarks: runs cells in sequence with the real trainer.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=... MASTER_PORT=... python benchmarks/train_worker.py CELLS.json

CELLS.json is a list of {"name", "config", "stop_at"}: a configuration as `python -m smelt.train` reads it, and the
held-out loss at which a cell ends before its last step (null: it does not). All cells run in the same processes, since
starting four of them takes longer than most cells. Rank 0 prints one line of JSON per finished cell.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as distributed
import transformers

from smelt.config import parse
from smelt.errors import SmeltError
from smelt.train.timing import PHASES
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.distributed import init_distributed
from smelt.train.trainer.run_folder import RunFolder
from smelt.train.trainer.trainer import Trainer

_MEASURED = 2**23  # bytes of the all-reduce that measures the bandwidth


class Reached(Exception):
    """The target held-out loss is reached."""


class StoppingTrainer(Trainer):
    """Ends when a held-out loss is reached, on all ranks in the same step; records the CPU time of each step."""

    stop_at: float | None = None

    def train_step(self) -> dict[str, Any]:
        before = process_time()
        line = super().train_step()
        return {**line, "cpu_seconds": process_time() - before}

    def log(self, entry: dict[str, Any], is_last: bool) -> None:
        super().log(entry, is_last)
        if self.stop_at is not None and "evaluation" in entry and entry["evaluation"]["loss"] <= self.stop_at:
            raise Reached


def main() -> None:
    cells = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("smelt.train").setLevel(logging.ERROR)
    device = init_distributed("cpu", 300.0)
    bandwidth = measured_bandwidth()
    with tempfile.TemporaryDirectory() as folder:
        places: list[Any] = [folder]
        distributed.broadcast_object_list(places)  # a local path suffices: all ranks are on one machine
        for number, cell in enumerate(cells):
            run_cell(cell, Path(places[0]) / str(number), device, bandwidth)
        distributed.barrier()
    distributed.destroy_process_group()


def measured_bandwidth() -> float:
    """Measure bits per second received per rank in an all-reduce, as of a ring."""
    workers, values = distributed.get_world_size(), torch.zeros(_MEASURED // 4)
    distributed.all_reduce(values)
    start = perf_counter()
    distributed.all_reduce(values)
    spent = torch.tensor(perf_counter() - start)
    distributed.all_reduce(spent, distributed.ReduceOp.MAX)
    return 8 * 2 * (workers - 1) / workers * _MEASURED / float(spent)


def run_cell(cell: dict[str, Any], out: Path, device: torch.device, bandwidth: float) -> None:
    first, load = distributed.get_rank() == 0, os.getloadavg()[0]
    if first:
        out.parent.mkdir(exist_ok=True)
    distributed.barrier()
    start, error = perf_counter(), None
    try:
        trainer = StoppingTrainer(
            parse(TrainConfig, cell["config"], "the cell"), out, device, resume=False, resplit=False
        )
        trainer.stop_at = cell["stop_at"]
        trainer.train()
    except Reached:
        pass
    except SmeltError as refused:  # the same on every rank: such as a loss that is not finite
        error = str(refused)
    distributed.barrier()
    if first:
        seconds = {"whole_seconds": perf_counter() - start, "load": load, "bits_per_second": bandwidth}
        print(json.dumps({"name": cell["name"], **summary(RunFolder(out)), **seconds, "error": error}), flush=True)


def summary(folder: RunFolder) -> dict[str, Any]:
    """Summarize a run from its log."""
    facts, lines = folder.read_metadata(), folder.read_log()
    spent, curve = 0.0, []
    for line in lines:
        spent += sum(line["phases"].values())  # without evaluations
        if "evaluation" in line:
            point = {
                "step": line["step"],
                "bytes": line["total_bytes"],
                "seconds": spent,
                "training_loss": line["loss"],
            }
            curve.append(point | line["evaluation"])
    settled = lines[len(lines) // 2 :]
    steps = [sum(line["phases"].values()) for line in settled]
    phases = {name: _quantile([line["phases"][name] for line in settled], 0.5) for name in PHASES}
    return {
        "parameters": facts["parameters"],
        "workers": facts["world_size"],
        "steps": len(lines),
        "curve": curve,
        "bytes_a_step": _mean([line["bytes"] for line in settled]),
        "build_up": _mean([line["build_up"] for line in settled]),
        "build_ups": [line["build_up"] for line in lines],
        "padding": _mean([line["padding"] for line in settled if line["padding"] is not None]),
        "step_seconds": _quantile(steps, 0.5),
        "quiet_step_seconds": _quantile(steps, 0.1),
        "cpu_seconds": _quantile([line["cpu_seconds"] for line in settled], 0.5),  # of rank 0
        "longest_step_seconds": max((sum(line["phases"].values()) for line in lines), default=None),
        "phases": phases,
        "chosen": None if facts["decision"] is None else facts["decision"]["choices"],
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantile(values: list[float], share: float) -> float | None:
    return sorted(values)[int(share * len(values))] if values else None


if __name__ == "__main__":
    main()
