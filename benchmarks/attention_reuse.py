"""Share attention maps between layers of a small decoder: loss without training, after a fit, and after fine-tuning.

    PYTHONPATH=src:benchmarks python benchmarks/attention_reuse.py [--device cuda] [--steps 600] [--seeds 0 1 2]
        [--folder FOLDER] [--resume] [--smoke]

A Llama-like network of 6 layers is trained on bytes of tiny Shakespeare with `smelt.train`, once per seed. Then a third
and a half of its layers use the map of another layer: as they are, with the output projections fitted again, and after
fine-tuning by `qat` with int8 weights and the logits of the trained network. The baseline of the latter is the trained
network after the same `qat` step. Groups by similarity are compared with random groups of the same sizes. Loss in nats
per byte is on the last tenth of the text, of the model as it is loaded from its artifact. Seconds are medians of eager
forward passes on this machine, dense and shared in turns; KV bytes are those of the cache that generation fills.
"""

from __future__ import annotations

import argparse
import gzip
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import mean, previous_rows, shared, table, write

from smelt.compression.base import MethodContext
from smelt.compression.distillation.training_run import process_group
from smelt.compression.methods import METHODS
from smelt.compression.pruning.attention_reuse import AttentionReuse
from smelt.config import parse
from smelt.data import load_text, text_batches
from smelt.measure.perplexity import perplexity
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.trainer import Trainer

CONTEXT = 128
NETWORK = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
SHARES = (1 / 3, 1 / 2)
FORMS = ("as it is", "fitted", "random groups, fitted", "fine-tuned, int8")
BASELINES = ("dense", "dense, fine-tuned, int8")
LENGTHS = (256, 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=64, help=f"calibration windows of {CONTEXT} bytes")
    parser.add_argument("--tuning-samples", type=int, default=1024, help="windows of an epoch of fine-tuning")
    parser.add_argument("--limit", type=int, default=65536, help="bytes that are scored")
    parser.add_argument("--folder", type=Path, help="for data and trained networks; kept if given")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="a few steps, no results are written")
    parser.add_argument("--name", default="attention_reuse", help="of the results file")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds, options.samples, options.limit = 3, [0], 4, 1024
        options.tuning_samples = 32
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
    shared_rows = [{"row": form, "share": share, "seed": seed} for share in SHARES for form in FORMS]
    return [*({"row": name, "share": 0.0, "seed": seed} for name in BASELINES), *shared_rows]


def write_texts(folder: Path) -> None:
    plays = gzip.decompress((shared() / "data" / "tinyshakespeare" / "input.txt.gz").read_bytes()).decode()
    cut = int(0.9 * len(plays))
    (folder / "train.txt").write_text(plays[:cut])
    (folder / "held_out.txt").write_text(plays[cut:])


def train(folder: Path, seed: int, options: argparse.Namespace) -> Path:
    """Train the network of a seed, unless the folder has it."""
    out = folder / f"{options.steps}-{seed}"
    if (out / "model" / "config.json").exists():
        return out / "model"
    content = {
        "model": NETWORK, "batch_size": 4 if options.smoke else 16, "seed": seed, "steps": options.steps,
        "data": {"train": str(folder / "train.txt"), "seq_len": CONTEXT}, "max_grad_norm": 1.0, "gradients": "none",
        "optimizer": {"lr": 2e-3, "weight_decay": 0.1, "beta2": 0.95}, "schedule": {"warmup_steps": 30},
        "evaluate": {"samples": 16}, "checkpoint": {"every": None}, "device": options.device.partition(":")[0],
    }  # fmt: skip
    device = torch.device(options.device)
    with process_group(device):
        Trainer(parse(TrainConfig, content, "the configuration"), out, device, resume=False, resplit=False).train()
    return out / "model"


def measure(source: Path, cell: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model, facts = load(source, device=options.device), {}
    if cell["share"]:
        facts = share_maps(model, cell, folder, options)
    if cell["row"].endswith("int8"):
        tune(model, source, cell["seed"], folder, options)
    with tempfile.TemporaryDirectory() as out:
        save_artifact(model, Path(out))
        again = load(out, device=options.device)
        size = (Path(out) / "model.safetensors").stat().st_size
    result = perplexity(again, load_text(folder / "held_out.txt"), context=CONTEXT, batch_size=16, limit=options.limit)
    timed = cell["row"] in ("dense", "fitted")
    return {
        "loss": math.log(result.value), "bytes": size, "kv_bytes": kv_bytes(again), "maps_of": facts.get("maps_of"),
        "divergence": facts.get("map_divergence"), "seconds": seconds(again, source, options) if timed else None,
    }  # fmt: skip


def share_maps(model: Model, cell: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    repair = "none" if cell["row"] == "as it is" or cell["row"].endswith("int8") else "full"
    method: Any = METHODS.build({"method": "attention-reuse", "layers": cell["share"], "repair": repair})
    if cell["row"].startswith("random"):
        method = RandomGroups(layers=cell["share"], repair=repair, seed=cell["seed"])
    batches = windows(model, folder, options.samples, 4, cell["seed"])
    facts: dict[str, Any] = method.apply(model, MethodContext(batches=batches, seed=cell["seed"]))
    return facts


@dataclass(frozen=True)
class RandomGroups(AttentionReuse):
    """Merges random neighbors instead of similar ones."""

    seed: int = 0

    def group(self, anatomy: Any, divergences: np.ndarray) -> dict[int, int]:
        generator = np.random.Generator(np.random.PCG64(self.seed))
        return super().group(anatomy, generator.random(len(divergences)))


def tune(model: Model, source: Path, seed: int, folder: Path, options: argparse.Namespace) -> None:
    step = {
        "method": "qat", "weights": {"quantizer": "lsq", "weight_format": "int8/row"}, "teacher": str(source),
        "losses": [{"loss": "logits"}], "epochs": 2, "batch_size": 16, "optimizer": {"lr": 5e-4},
    }  # fmt: skip
    batches = windows(model, folder, options.tuning_samples, 16, seed + 100)
    METHODS.build(step).apply(model, MethodContext(batches=batches, seed=seed))


def windows(model: Model, folder: Path, samples: int, batch_size: int, seed: int) -> list[dict[str, torch.Tensor]]:
    assert model.tokenizer is not None
    data = load_text(folder / "train.txt")
    return text_batches(data, model.tokenizer, samples=samples, length=CONTEXT, batch_size=batch_size, seed=seed)


@torch.inference_mode()
def kv_bytes(model: Model) -> int:
    """Return the bytes of the KV cache of one sequence."""
    tokens = torch.zeros(1, CONTEXT, dtype=torch.int64, device=model.device)
    layers = model.network(tokens, use_cache=True).past_key_values.layers
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


@torch.inference_mode()
def seconds(model: Model, source: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the median times of a forward pass by length: of the dense network, eager, and of this one."""
    dense = load(source, device=options.device).network
    dense.set_attn_implementation("eager")
    times: dict[str, list[float]] = {}
    for length in LENGTHS:
        tokens = torch.zeros(1, length, dtype=torch.int64, device=model.device)
        samples: list[list[float]] = [[], []]
        for repeat in range(3 if options.smoke else 13):
            for network, found in zip((dense, model.network), samples, strict=True):
                start = time.perf_counter()
                network(tokens, use_cache=False)
                if options.device.startswith("cuda"):
                    torch.cuda.synchronize()
                if repeat > 1:
                    found.append(time.perf_counter() - start)
        times[str(length)] = [statistics.median(found) for found in samples]
    return times


def text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    base = {(row["row"], row["seed"]): row for row in rows if row["row"] in BASELINES}
    seeds = sorted({row["seed"] for row in rows})
    parts = [
        "# Sharing attention maps in a small decoder\n",
        f"Llama-like, 6 layers of 128 channels and 4 heads, {options.steps} steps on bytes of tiny Shakespeare. "
        f"Loss in nats per held-out byte, {len(seeds)} seed(s), mean; changes are by seed, relative to the dense "
        "network (fine-tuned rows: to the dense network after the same fine-tuning).\n",
    ]
    lines = []
    for name, share in [(name, 0.0) for name in BASELINES] + [(form, share) for share in SHARES for form in FORMS]:
        same = [row for row in rows if row["row"] == name and row["share"] == share]
        if not same:
            continue
        against = BASELINES[1] if name.endswith("int8") else BASELINES[0]
        known = [(row, base[against, row["seed"]]) for row in same if (against, row["seed"]) in base]
        changes = ", ".join(f"{100 * (row['loss'] / other['loss'] - 1):+.2f} %" for row, other in known)
        groups = [row["maps_of"] for row in same if row["maps_of"]]
        lines.append([
            f"{name}, {share:.2f} of the layers" if share else name, f"{mean([row['loss'] for row in same]):.4f}",
            changes if share else "-", f"{same[0]['bytes'] / 1e6:.2f}", f"{same[0]['kv_bytes'] / 1024:.0f}",
            " ".join(f"{layer}:{leader}" for layer, leader in groups[0].items()) if groups else "-",
        ])  # fmt: skip
    headings = ["row", "loss", "change", "MB on disk", "KiB of KV cache, 128 tokens", "layer:map of (seed 0)"]
    parts.append(table(headings, lines))
    timed = [row for row in rows if row["row"] == "fitted" and row["seconds"]]
    if timed:
        speed = []
        for row in timed:
            pairs = row["seconds"].values()
            times = [f"{1000 * dense:.1f} / {1000 * ours:.1f} ({dense / ours:.2f}x)" for dense, ours in pairs]
            speed.append([f"{row['share']:.2f}", str(row["seed"]), *times])
        parts.append("\nMilliseconds of a forward pass, dense with eager attention / shared:\n")
        parts.append(table(["layers without a map", "seed", *(f"{n} tokens" for n in LENGTHS)], speed))
    return "\n".join(parts)


if __name__ == "__main__":
    main()
