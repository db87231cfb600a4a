"""Remove experts of a small trained mixture: REAP, frequency, merging and random, with uniform and unequal counts.

    PYTHONPATH=src:benchmarks python benchmarks/expert_pruning.py [--device cuda] [--size small] [--steps 600]
        [--seeds 0 1 2] [--folder FOLDER] [--resume] [--smoke]

An OLMoE-like network (byte tokens, top-2 routing, load-balancing loss) is trained on half tiny Shakespeare and half
WikiText-2 with `smelt.train`, once per seed. Then 25 % and 50 % of its experts are removed. The score is the loss in
nats per byte on text that is neither trained on nor used for calibration. Every result is saved, loaded again and
measured as loaded. Seeds differ in initialization, data order and calibration windows.

`--folder` keeps the trained networks; `--resume` keeps finished rows.
"""

from __future__ import annotations

import argparse
import gzip
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import mean, previous_rows, shared, table, write

from smelt.compression.base import MethodContext
from smelt.compression.distillation.training_run import process_group
from smelt.compression.methods import METHODS
from smelt.compression.pruning.expert_pruning import expert_parameters
from smelt.config import parse
from smelt.data import load_text, text_batches
from smelt.measure.cost import block_parameters, count_parameters
from smelt.measure.perplexity import perplexity
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.trainer import Trainer

CONTEXT = 128
SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_experts": 16},
    "medium": {"hidden_size": 384, "intermediate_size": 384, "num_hidden_layers": 6, "num_experts": 16},
}
CUTS = (0.25, 0.5)
ROWS: dict[str, dict[str, Any]] = {
    **{
        f"{method}, {counts}": {"method": method, "experts_per_layer": counts}
        for method in ("reap", "expert-frequency", "expert-merging", "expert-random")
        for counts in ("uniform", "free")
    },
    "expert-merging, not aligned": {"method": "expert-merging", "experts_per_layer": "uniform", "align": False},
}
del ROWS["expert-random, free"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=128, help=f"calibration windows of {CONTEXT} bytes")
    parser.add_argument("--limit", type=int, default=65536, help="bytes that are scored")
    parser.add_argument("--folder", type=Path, help="for data and trained networks; kept if given")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="a few steps, no results are written")
    parser.add_argument("--name", default="expert_pruning", help="of the results file")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds, options.samples, options.limit = 3, [0], 4, 1024
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_texts(folder)
        rows = [] if options.smoke else previous_rows(options.name, options.resume)
        for seed in options.seeds:
            source = train(folder, seed, options)
            for cell in cells(seed):
                if any(all(row[key] == cell[key] for key in cell) for row in rows):
                    continue
                rows.append({**cell, **measure(source, cell, folder, options)})
                print(rows[-1], flush=True)
                if not options.smoke:
                    write(options.name, rows, text(rows, options))
        print(text(rows, options))


def cells(seed: int) -> list[dict[str, Any]]:
    pruned = [{"row": name, "cut": cut, "seed": seed} for cut in CUTS for name in ROWS]
    return [{"row": "all experts", "cut": 0.0, "seed": seed}, *pruned]


def write_texts(folder: Path) -> None:
    """Write the text to train on, half of each source in alternating pieces, and the text to score."""
    data = shared() / "data"
    plays = gzip.decompress((data / "tinyshakespeare" / "input.txt.gz").read_bytes()).decode()
    articles = gzip.decompress((data / "wikitext2" / "train.txt.gz").read_bytes()).decode()[: len(plays)]
    held_out = gzip.decompress((data / "wikitext2" / "test.txt.gz").read_bytes()).decode()
    cut, piece = int(0.9 * len(plays)), 4096
    mixed = [text[start : start + piece] for start in range(0, cut, piece) for text in (plays[:cut], articles)]
    (folder / "train.txt").write_text("".join(mixed))
    rest = plays[cut:]
    scored = [text[start : start + piece] for start in range(0, len(rest), piece) for text in (rest, held_out)]
    (folder / "held_out.txt").write_text("".join(scored))


def train(folder: Path, seed: int, options: argparse.Namespace) -> Path:
    """Train the mixture of a seed, unless the folder has it."""
    out = folder / f"{options.size}-{options.steps}-{seed}"
    if (out / "model" / "config.json").exists():
        return out / "model"
    network = {
        "model_type": "olmoe", "num_attention_heads": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "max_position_embeddings": 256, "output_router_logits": True, "router_aux_loss_coef": 0.01,
        **SIZES[options.size],
    }  # fmt: skip
    content = {
        "model": network, "batch_size": 4 if options.smoke else 16, "seed": seed, "steps": options.steps,
        "data": {"train": str(folder / "train.txt"), "seq_len": CONTEXT}, "max_grad_norm": 1.0, "gradients": "none",
        "optimizer": {"lr": 2e-3, "weight_decay": 0.1, "beta2": 0.95}, "schedule": {"warmup_steps": 30},
        "evaluate": {"samples": 16}, "checkpoint": {"every": None}, "device": options.device.partition(":")[0],
    }  # fmt: skip
    device = torch.device(options.device)
    with process_group(device):
        Trainer(parse(TrainConfig, content, "the configuration"), out, device, resume=False, resplit=False).train()
    return out / "model"


def measure(source: Path, cell: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = load(source, device=options.device)
    start = time.perf_counter()
    if cell["row"] in ROWS:
        prune(model, cell, folder, options)
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as out:
        save_artifact(model, Path(out))
        size = (Path(out) / "model.safetensors").stat().st_size
        again = load(out, device=options.device)
    result = perplexity(
        again, load_text(folder / "held_out.txt"), context=CONTEXT, batch_size=16, limit=options.limit
    )  # fmt: skip
    return {
        "loss": math.log(result.value), "experts": [mixture.num_experts for mixture in again.anatomy.mixtures],
        "parameters": count_parameters(again.network), "bytes": size, "seconds": seconds,
    }  # fmt: skip


def prune(model: Model, cell: dict[str, Any], folder: Path, options: argparse.Namespace) -> None:
    """Remove a share of all experts: as a budget, the parameters of the blocks without them."""
    anatomy = model.anatomy
    experts = sum(expert_parameters(mixture) * mixture.num_experts for mixture in anatomy.mixtures)
    keep = 1 - cell["cut"] * experts / block_parameters(anatomy)
    calibration = load_text(folder / "train.txt")
    assert model.tokenizer is not None
    batches = text_batches(
        calibration, model.tokenizer, samples=options.samples, length=CONTEXT, batch_size=8, seed=cell["seed"]
    )  # fmt: skip
    method = METHODS.build({**ROWS[cell["row"]], "budget": {"parameters": keep}})
    method.apply(model, MethodContext(batches=batches, seed=cell["seed"]))


def text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    dense = {row["seed"]: row for row in rows if row["row"] == "all experts"}
    first = next(iter(dense.values()))
    parts = [
        "# Pruning the experts of a small mixture\n",
        f"OLMoE-like, {len(first['experts'])} layers of {first['experts'][0]} experts, 2 per token, "
        f"{first['parameters']:,} parameters, {options.steps} steps on bytes of tiny Shakespeare and WikiText-2. "
        f"Loss in nats per held-out byte: mean of {len(dense)} seeds, and the increase of each seed.\n",
    ]
    cells = [
        [
            "all experts",
            "-",
            f"{mean([row['loss'] for row in dense.values()]):.4f}",
            "-",
            "-",
            sizes(list(dense.values())),
        ]
    ]
    for cut in CUTS:
        for name in ROWS:
            same = [row for row in rows if row["row"] == name and row["cut"] == cut]
            if not same:
                continue
            increases = [row["loss"] - dense[row["seed"]]["loss"] for row in same]
            cells.append([
                name, f"{100 * cut:.0f} %", f"{mean([row['loss'] for row in same]):.4f}", f"{mean(increases):+.4f}",
                ", ".join(f"{value:+.4f}" for value in increases), sizes(same),
            ])  # fmt: skip
    headings = [
        "method, experts per layer",
        "removed",
        "loss",
        "increase",
        "by seed",
        "MB on disk; experts by layer (seed 0)",
    ]
    return "\n".join([*parts, table(headings, cells)])


def sizes(rows: list[dict[str, Any]]) -> str:
    return f"{rows[0]['bytes'] / 1e6:.1f}; {' '.join(map(str, rows[0]['experts']))}"


if __name__ == "__main__":
    main()
