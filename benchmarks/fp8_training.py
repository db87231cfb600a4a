"""Training in FP8: a small GPT on tiny Shakespeare and ResNet-20 on CIFAR-10, in every precision, from the same start.

    PYTHONPATH=src:benchmarks python benchmarks/fp8_training.py [--device cuda] [--epochs 5] [--steps 1500] [--seeds 0]
        [--networks gpt resnet] [--rows "2018 recipe" ...] [--jobs 1] [--smoke]

Rows: bf16; scaled FP8 (E4M3, E5M2) with each scaling; the recipe of Wang et al., 2018, it without chunks and without
stochastic rounding; and that recipe with the accumulator widths that VRR predicts for each GEMM, and 2 and 3 bits
fewer; named with `--rows`, these without chunks, too. All rows have the same data order, optimizer and schedule. The
convolutions of ResNet-20 are multiplied in FP8 as unfolded images; it has no layer whose dimensions are multiples of
128, so that there is no blockwise row. A row that diverges is written as such. Every row is a process of its own.

`--resume` adds the rows that a cut-off run lacks. The emulated rows are slow. Without chunks, sums over 131,072
products are one chain of additions each, which leaves most of a GPU idle: start NVIDIA MPS and raise --jobs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from cifar_resnet import CLASSES, WIDTHS
from common import previous_rows, shared, table, write
from qat_cifar import images
from qat_runs import Row, print_row, run_cell
from train_runs import cifar10

from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.training_run import process_group
from smelt.config import parse
from smelt.errors import SmeltError
from smelt.models.cifar_resnet import CifarResNetConfig, CifarResNetForImageClassification
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.run_folder import RunFolder
from smelt.train.trainer.tasks import TrainingTask
from smelt.train.trainer.trainer import Trainer

PREDICTED = {"forward": None, "backward": None, "gradient": None}


def chunked(**settings: Any) -> Row:
    return {"precision": "fp8-chunked", "fp8_chunked": settings}


ROWS: dict[str, Row] = {
    "bf16": {"precision": "bf16"},
    **{
        f"fp8, {scaling}": {"precision": "fp8", "fp8": {"scaling": scaling, "convolutions": True}}
        for scaling in ("tensorwise", "delayed", "rowwise", "blockwise")
    },
    "2018 recipe": chunked(),
    "2018 recipe, no chunks": chunked(chunk_size=None),
    "2018 recipe, no stochastic rounding": chunked(stochastic_rounding=False),
    **{
        f"2018 recipe, VRR{f' - {fewer} bits' if fewer else ''}{', no chunks' if chunk is None else ''}": chunked(
            chunk_size=chunk, accumulator_bits=PREDICTED, bits_below_prediction=fewer
        )
        for chunk in (64, None)
        for fewer in (0, 2, 3)
    },
}
SMOKE_ROWS = ["bf16", "fp8, delayed", "2018 recipe", "2018 recipe, VRR - 3 bits, no chunks"]
NOT_APPLICABLE = {("resnet", "fp8, blockwise")}
SLOW = {name for name in ROWS if "VRR" in name and name.endswith("no chunks")}  # seconds per step of ResNet-20
GPT = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
SMOKE_GPT = {**GPT, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="+", default=["gpt", "resnet"], choices=["gpt", "resnet"])
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="default: all but the slowest")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=float, default=5, help="of ResNet-20")
    parser.add_argument("--steps", type=int, default=1500, help="of the GPT")
    parser.add_argument("--jobs", type=int, default=1, help="rows that are trained at the same time")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="a few steps of tiny networks; no results are written")
    parser.add_argument(
        "--folder", type=Path, help="for data and finished rows; kept if given, and then a cut-off run goes on"
    )
    parser.add_argument("--name", default="fp8_training", help="of the results file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # train one row in this process
    options = parser.parse_args()
    if options.cell is not None:
        print_row(train_row(json.loads(options.cell), options))
        return
    options.rows = options.rows or (SMOKE_ROWS if options.smoke else [name for name in ROWS if name not in SLOW])
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        prepare_data(options.folder, options.networks)
        cells = [
            {"network": network, "row": name, "seed": seed}
            for seed in options.seeds for network in options.networks for name in options.rows
            if (network, name) not in NOT_APPLICABLE
        ]  # fmt: skip
        rows = previous_rows(options.name, options.resume)
        done = [{key: row[key] for key in cells[0]} for row in rows]
        missing = [cell for cell in cells if cell not in done]
        total = len(rows) + len(missing)
        with ThreadPoolExecutor(options.jobs) as pool:
            for future in as_completed(pool.submit(run_row, cell, options) for cell in missing):
                rows.append(future.result())
                rows.sort(key=lambda row: list(ROWS).index(row["row"]))
                if options.smoke:
                    print(text(rows, options, total))
                else:
                    write(options.name, rows, text(rows, options, total))


def prepare_data(folder: Path, networks: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if "gpt" in networks:
        packed = shared() / "data" / "tinyshakespeare" / "input.txt.gz"
        (folder / "shakespeare.txt").write_bytes(gzip.decompress(packed.read_bytes()))
    if "resnet" in networks and not (folder / "cifar10.npz").exists():
        cifar10(folder)


def run_row(cell: Row, options: argparse.Namespace) -> Row:
    if options.smoke:
        return train_row(cell, options)
    flags = ["--device", options.device, "--epochs", str(options.epochs), "--steps", str(options.steps)]
    row = run_cell(__file__, json.dumps(cell), ["--folder", str(options.folder), *flags], options.folder)
    if "failed" in row:
        raise SystemExit(f"{cell} failed:\n{row['failed']}")
    return row


def train_row(cell: Row, options: argparse.Namespace) -> Row:
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    config, task = (gpt if cell["network"] == "gpt" else resnet)(cell, options)
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder, process_group(device):
        trainer = Trainer(config, Path(folder) / "run", device, resume=False, resplit=False, task=task)
        diverged = None
        try:
            trainer.train()
        except SmeltError as error:
            diverged = str(error)
        log = RunFolder(Path(folder) / "run").read_log()
        facts = RunFolder(Path(folder) / "run").read_metadata()["low_precision"] or {}
    every = max(len(log) // 50, 1)
    phases = [sum(line["phases"].values()) for line in log[1:] or log]
    return {
        **cell, "steps": len(log), "diverged": diverged, "step_seconds": statistics.median(phases) if phases else None,
        "held_out": next((line["evaluation"] for line in reversed(log) if line.get("evaluation")), None),
        "fp8": facts.get("fp8"), "emulated": facts.get("emulated"),
        "loss_curve": [[line["step"], line["loss"]] for line in log[::every]],
    }  # fmt: skip


def gpt(cell: Row, options: argparse.Namespace) -> tuple[TrainConfig, None]:
    content = {
        "model": SMOKE_GPT if options.smoke else GPT, "batch_size": 2 if options.smoke else 16, "seed": cell["seed"],
        "data": {"train": str(options.folder / "shakespeare.txt"), "seq_len": 64 if options.smoke else 256},
        "steps": 4 if options.smoke else options.steps, "max_grad_norm": 1.0, "gradients": "none",
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "beta2": 0.95}, "schedule": {"warmup_steps": 100},
        "evaluate": {"samples": 2 if options.smoke else 512}, "checkpoint": {"every": None}, "device": options.device,
        **ROWS[cell["row"]],
    }  # fmt: skip
    return parse(TrainConfig, content, "the configuration"), None


def resnet(cell: Row, options: argparse.Namespace) -> tuple[TrainConfig, TrainingTask]:
    device, smoke = torch.device(options.device), options.smoke
    train = Samples.from_batches(
        [images(options.folder, "train", options.device, 64 if smoke else None)], device, augment=True,
        seed=cell["seed"],
    )  # fmt: skip
    held_out = Samples(images(options.folder, "test", options.device, 8 if smoke else None))
    batch_size = 4 if smoke else 128
    content = {
        "model": "resnet-20", "task": "images", "batch_size": batch_size, "seed": cell["seed"], "gradients": "none",
        "steps": 2 if smoke else max(round(options.epochs * len(train) / batch_size), 1),
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
        "evaluate": {"samples": 100_000}, "checkpoint": {"every": None}, "device": options.device,
        **ROWS[cell["row"]],
    }  # fmt: skip
    torch.manual_seed(cell["seed"])
    depth = 1 if smoke else 3
    network = CifarResNetForImageClassification(
        CifarResNetConfig(
            embedding_size=WIDTHS[0], hidden_sizes=list(WIDTHS), depths=[depth] * 3, layer_type="basic",
            num_labels=len(CLASSES), image_size=32,
        )
    )  # fmt: skip
    task = TrainingTask(network, train, held_out, is_classifier=True, saves_model=False)
    return parse(TrainConfig, content, "the configuration"), task


def text(rows: list[Row], options: argparse.Namespace, total: int) -> str:
    parts = ["# Training in FP8\n"]
    if len(rows) < total:
        parts.append(f"{len(rows)} of {total} rows: the run was cut off.\n")
    for network in dict.fromkeys(row["network"] for row in rows):
        same = [row for row in rows if row["network"] == network]
        metric = "loss" if network == "gpt" else "accuracy"
        cells = []
        for name in dict.fromkeys(row["row"] for row in same):
            seeds = [row for row in same if row["row"] == name]
            done = [row["held_out"][metric] for row in seeds if row["held_out"]]
            values = [f"{value:.4f}" if metric == "loss" else f"{100 * value:.2f}" for value in done]
            losses = [f"{row['held_out']['loss']:.3f}" for row in seeds if row["held_out"]]
            diverged = sum(row["diverged"] is not None for row in seeds)
            cells.append([
                name, ", ".join(values) + f"{' diverged: ' + str(diverged) if diverged else ''}",
                *([] if metric == "loss" else [", ".join(losses)]), share(seeds[0]["fp8"]), share(seeds[0]["emulated"]),
            ])  # fmt: skip
        title = (
            f"Llama of 4 layers and 256 channels on tiny Shakespeare as bytes, {options.steps} steps, AdamW"
            if network == "gpt"
            else f"ResNet-20 on CIFAR-10 (JPEG copies), {options.epochs:g} epochs from random weights, SGD"
        )
        measured = ["held-out loss by seed"] if network == "gpt" else ["accuracy by seed, %", "held-out loss"]
        headings = ["precision", *measured, "GEMM FLOPs in FP8", "emulated"]
        parts += [f"## {title}\n", table(headings, cells) + "\n"]
    return "\n".join(parts)


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
