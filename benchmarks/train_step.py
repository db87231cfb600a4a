"""Time of a training step on a GPU: kernel by kernel, as CUDA graphs, and compiled; quantization-aware or in float.

    PYTHONPATH=src:benchmarks python benchmarks/train_step.py [--steps 40] [--modes eager graphs compiled] [--rows ...]

Each row trains a real network for a few steps: ResNet-20 on CIFAR-10 in batches of 256, MiniLM-L6 on MRPC in batches of
64 texts, SmolLM2-135M on WikiText-2 in batches of 16 x 512 tokens, all with the settings of the benchmarks of
quantization-aware training. Median wall time of the second half of the steps; `replays` counts the steps that were
replayed graphs, and a mode with graphs in which none was is an error. Every row is a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import qat_cifar
import qat_decoder
import qat_glue
import torch
from cifar_resnet import write_model
from common import table, write
from finetune_glue import with_head
from qat_runs import Row, print_row, run_cell
from train_runs import cifar10

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.models.load import load
from smelt.models.model import Model
from smelt.progress import NullProgress
from smelt.train.trainer.cuda_graphs import CudaGraphs

MODES: dict[str, Row] = {
    "eager": {"cuda_graphs": False},
    "graphs": {},
    "compiled": {"compile": True, "cuda_graphs": False},
    "compiled, graphs": {"compile": True},
}
CNN, ENCODER, DECODER = "ResNet-20", "MiniLM-L6", "SmolLM2-135M"
ROWS: dict[str, tuple[str, str]] = {
    "ResNet-20, PACT + SAWB": (CNN, "PACT + SAWB"),
    "ResNet-20, SPEQ": (CNN, "PACT + SAWB, SPEQ u = 0.5"),
    "ResNet-20, min-max": (CNN, "min-max"),
    "MiniLM-L6, 2 bits, prediction": (ENCODER, "prediction"),
    "MiniLM-L6, 2 bits, all losses": (ENCODER, qat_glue.PLAIN),
    "SmolLM2-135M, 2 bits, ground truth": (DECODER, "2 bits, ground truth"),
    "SmolLM2-135M, 2 bits, logit KD": (DECODER, "2 bits, logit KD"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--jobs", type=int, default=1, help="more than one for a rough look only")
    parser.add_argument("--profile", action="store_true", help="also write the kernels that take the most time")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--name", default="train_step", help="of the results file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell is not None:
        print_row(time_row(*options.cell.split("; "), options))
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        options.folder.mkdir(parents=True, exist_ok=True)
        if any(ROWS[row][0] == CNN for row in options.rows):
            cifar10(options.folder)
        flags = ["--device", options.device, "--steps", str(options.steps), "--folder", str(options.folder)]
        flags += ["--profile"] * options.profile
        cells = [f"{row}; {mode}" for row in options.rows for mode in options.modes]
        with ThreadPoolExecutor(options.jobs) as pool:
            rows = list(pool.map(lambda cell: run_cell(__file__, cell, flags, options.folder), cells))
    rows = [row for row in rows if "failed" not in row]
    write(options.name, rows, text(rows, options))


class StepTimes(NullProgress):
    """Records the time after every step of training; profiles three of them if told to."""

    def __init__(self, method: str, options: Namespace) -> None:
        self.method, self.options = method, options
        self.times: list[float] = []
        self.profile = ""

    def track(self, items: Iterable[Any], description: str, total: int | None = None) -> Iterator[Any]:
        if description != self.method:
            yield from items
            return
        profiler: Any = None
        for index, item in enumerate(items):
            self.times.append(qat_decoder.now(self.options))
            yield item
            if self.options.profile and total is not None and index == total - 5:
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                profiler.__enter__()
            if profiler is not None and total is not None and index == total - 2:
                profiler.__exit__(None, None, None)
                self.profile = profiler.key_averages().table(
                    sort_by="cuda_time_total", row_limit=14, max_name_column_width=70
                )


def time_row(name: str, mode: str, options: Namespace) -> Row:
    kind, row = ROWS[name]
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model, step, batches = {CNN: resnet, ENCODER: encoder, DECODER: decoder}[kind](row, options)
    calls: list[CudaGraphs] = []
    init = CudaGraphs.__init__
    CudaGraphs.__init__ = lambda self, *args: (calls.append(self), init(self, *args))[1]  # type: ignore[method-assign]
    progress = StepTimes(step["method"], options)
    with tempfile.TemporaryDirectory() as folder:
        context = MethodContext(batches=batches, seed=0, folder=Path(folder), progress=progress)
        facts = METHODS.build({**step, **MODES[mode]}).apply(model, context)
    if options.profile:
        profiles = options.folder / "profiles"
        profiles.mkdir(exist_ok=True)
        (profiles / f"{name}, {mode}.txt").write_text(progress.profile)
    seconds = [after - before for before, after in zip(progress.times, progress.times[1:], strict=False)]
    replays = sum(each.replays for each in calls)
    assert options.device == "cpu" or replays > 0 or not METHODS.build({**step, **MODES[mode]}).to_json()["cuda_graphs"]
    return {
        "row": name, "mode": mode, "step_seconds": statistics.median(seconds[len(seconds) // 2 :]), "replays": replays,
        "steps": facts["steps"], "final_loss": facts["final_loss"], "first_seconds": sum(seconds[: len(seconds) // 2]),
        "peak_bytes": torch.cuda.max_memory_allocated() if options.device == "cuda" else None,
    }  # fmt: skip


def resnet(row: str, options: Namespace) -> tuple[Model, Row, list[Any]]:
    model = load(str(write_model(options.folder / f"published-{id(options)}")), device=options.device)
    batch = qat_cifar.images(options.folder, "train", options.device, options.steps * 256)
    part = Namespace(epochs=1.0, compile=False)
    return model, qat_cifar.settings(row, 2, part), [batch]


def encoder(row: str, options: Namespace) -> tuple[Model, Row, list[Any]]:
    torch.manual_seed(0)
    model = with_head(2, options.device)
    part = Namespace(steps=options.steps, rows=3000, smoke=False, device=options.device)
    cell = {"task": "mrpc", "row": row, "weights": "2-bit"}
    return model, qat_glue.settings(cell, part), qat_glue.training_batches(cell, model, part)


def decoder(row: str, options: Namespace) -> tuple[Model, Row, list[Any]]:
    model = load("smollm2-135m", device=options.device, dtype=torch.float32)
    part = Namespace(
        samples=round(options.steps * qat_decoder.BATCH_SIZE / 0.95), epochs=1.0, device=options.device, seq_len=512,
        seed=0,
    )  # fmt: skip
    step = qat_decoder.main_rows(64)[row][0]
    return model, qat_decoder.settings(step, part), qat_decoder.train_batches(model, part)


def text(rows: list[Row], options: Namespace) -> str:
    cells = []
    for name in dict.fromkeys(row["row"] for row in rows):
        same = {row["mode"]: row for row in rows if row["row"] == name}
        slowest = same.get("eager", next(iter(same.values())))["step_seconds"]
        for mode, row in same.items():
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
            cells.append([
                name, mode, f"{1e3 * row['step_seconds']:.1f}", f"{slowest / row['step_seconds']:.2f}",
                f"{row['replays']} of {row['steps']}", f"{row['final_loss']:.4f}", peak,
            ])  # fmt: skip
    headings = ["network", "mode", "ms per step", "times eager", "replayed", "final loss", "peak GiB"]
    return f"# A training step on a GPU\n\n{options.steps} steps each, one process at a time.\n\n" + table(
        headings, cells
    )


if __name__ == "__main__":
    main()
