"""Depth and width baselines on SmolLM2-135M: WikiText-2 perplexity at equal budgets of block parameters, untrained.

    PYTHONPATH=src:benchmarks python benchmarks/depth_width.py [--samples 64] [--windows 64] [--seeds 0 1 2]
        [--device cuda] [--resume]

Whole blocks by Block Influence (ShortGPT) and by the loss without them (Minitron), the reverse order of ShortGPT as a
negative control, hidden size (SliceGPT with one rotation for all blocks), and equal widths of heads and FFN channels
(Minitron) beside Fisher pruning without repair. All see the same calibration windows of the training split, which a
seed draws; nothing is trained. Parameters are all of the model's: SliceGPT unties the head. The speedup is that of one
forward of 128 tokens on CPU with one thread, against the source model in turns, for the first seed. Rows are written as
they are finished.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import numpy as np
import torch
from common import previous_rows, shared, table, write
from qat_runs import is_too_late

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.compression.pruning.shortgpt import block_influence
from smelt.data import load_text, text_batches
from smelt.errors import SmeltError
from smelt.measure.cost import block_parameters, count_parameters
from smelt.measure.latency import compare_latency
from smelt.measure.perplexity import perplexity
from smelt.models.depth import keep_blocks
from smelt.models.load import load
from smelt.models.model import Model

KEPT = (0.9, 0.8, 0.7)
CONTEXT, LENGTH, BATCH = 1024, 256, 4
REVERSED = "blocks of highest influence (control)"
SETTINGS: dict[str, dict[str, Any]] = {
    "ShortGPT": {"method": "shortgpt"},
    REVERSED: {},
    "Minitron depth": {"method": "minitron-depth"},
    "SliceGPT": {"method": "slicegpt"},
    "Minitron width": {"method": "minitron"},
    "Fisher without repair": {"method": "fisher", "repair": "none"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64, help=f"calibration windows of {LENGTH} tokens")
    parser.add_argument("--windows", type=int, default=64, help=f"test windows of {CONTEXT} tokens")
    parser.add_argument("--kept", type=float, nargs="+", default=list(KEPT), help="shares of the block parameters")
    parser.add_argument("--methods", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the calibration windows")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="depth_width", help="of the results file")
    parser.add_argument("--resume", action="store_true", help="keep the rows of a run that was cut off")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.device.startswith("cuda") else torch.get_num_threads())
    base = load("smollm2-135m", device=options.device)
    base_on_cpu = load("smollm2-135m")
    train = load_text(shared() / "data/wikitext2/train.txt.gz")
    rows = previous_rows(options.name, options.resume)
    if not rows:
        rows = [{"method": "dense", "kept": 1.0, "seed": 0, **measure(base, None, options), "seconds": 0.0}]
    done = {key(row) for row in rows}
    cells = [
        {"method": name, "kept": kept, "seed": seed}
        for seed in options.seeds for kept in options.kept for name in options.methods
    ]  # fmt: skip
    for cell in cells:
        if key(cell) in done or is_too_late():
            continue
        batches = text_batches(
            train, base.tokenizer, samples=options.samples, length=LENGTH, batch_size=BATCH, seed=cell["seed"]
        )
        model = Model(copy.deepcopy(base.network), base.tokenizer, source="smollm2-135m")
        begun = time.monotonic()
        try:
            removed = prune(model, cell["method"], cell["kept"], MethodContext(batches=batches, seed=cell["seed"]))
        except SmeltError as error:
            print(cell, error, flush=True)
            continue
        seconds = time.monotonic() - begun
        timed_against = base_on_cpu if cell["seed"] == options.seeds[0] else None
        row = {**cell, **measure(model, timed_against, options), "seconds": seconds, **removed}
        rows.append(row)
        print(row, flush=True)
        write(options.name, rows, text(rows, options))


def key(row: dict[str, Any]) -> tuple[str, float, int]:
    return row["method"], row["kept"], row["seed"]


def prune(model: Model, name: str, kept: float, context: MethodContext) -> dict[str, Any]:
    if name == REVERSED:
        order, blocks = np.argsort(block_influence(model, context)), len(model.anatomy.blocks)
        stay = sorted(order[: int(kept * blocks + 1e-9)].tolist())
        keep_blocks(model.anatomy, stay)
        return {"blocks_removed": [index for index in range(blocks) if index not in stay]}
    facts = METHODS.build({**SETTINGS[name], "budget": {"parameters": kept}}).apply(model, context)
    return {key: facts[key] for key in ("blocks_removed", "hidden_size_after", "variance_kept") if key in facts}


def measure(model: Model, base_on_cpu: Model | None, options: argparse.Namespace) -> dict[str, Any]:
    test = load_text(shared() / "data/wikitext2/test.txt.gz")
    quality = perplexity(model, test, context=CONTEXT, limit=options.windows * CONTEXT, batch_size=BATCH)
    if base_on_cpu is not None:
        model.network.cpu()
    return {
        "perplexity": quality.value,
        "block_parameters": block_parameters(model.anatomy),
        "parameters": count_parameters(model.network),
        "prompt_speedup": compare_latency(model, base_on_cpu, repeats=10).ratio if base_on_cpu is not None else None,
    }


def text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    dense = rows[0]
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["kept"]), []).append(row)
    ordered = sorted(groups.values(), key=lambda same: (-same[0]["kept"], mean(same, "perplexity")))
    cells = [
        [
            same[0]["method"], f"{same[0]['kept']:g}",
            f"{mean(same, 'block_parameters') / dense['block_parameters']:.3f}",
            f"{mean(same, 'parameters') / 1e6:.1f}", f"{mean(same, 'perplexity'):.2f}",
            ", ".join(f"{row['perplexity']:.2f}" for row in same), _speedup(same),
            f"{mean(same, 'seconds'):.0f}", "; ".join(dict.fromkeys(_what(row) for row in same)),
        ]
        for same in ordered
    ]  # fmt: skip
    headings = ["method", "budget", "block parameters", "all parameters, M", "perplexity", "by seed", "prompt of 128",
                "seconds", "what went"]  # fmt: skip
    return (
        f"# Depth and width baselines: SmolLM2-135M, WikiText-2\n\nNothing is trained or repaired. {options.samples} "
        f"calibration windows of {LENGTH} tokens; perplexity at context {CONTEXT} on the first {options.windows} "
        f"windows of the test split.\n\n{table(headings, cells)}"
    )


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def _speedup(same: list[dict[str, Any]]) -> str:
    known = [row["prompt_speedup"] for row in same if row["prompt_speedup"] is not None]
    return f"{statistics.mean(known):.2f}x" if known else ""


def _what(row: dict[str, Any]) -> str:
    if "blocks_removed" in row:
        return "blocks " + ", ".join(map(str, row["blocks_removed"]))
    return f"hidden size {row['hidden_size_after']}" if "hidden_size_after" in row else ""


if __name__ == "__main__":
    main()
