"""Share attention maps between layers of a small decoder: loss without training, after a fit, and after distillation.

    PYTHONPATH=src:benchmarks python benchmarks/attention_reuse.py --device cuda [--jobs 6] [--resume]
        [--no-latency | --latency-only --folder FOLDER]
    PYTHONPATH=src:benchmarks python benchmarks/attention_reuse.py --smoke --device cpu

A Llama-like network of --layers layers is trained on bytes of tiny Shakespeare with `smelt.train`, once per seed. Then
a third and a half of its layers use the map of another layer: as they are, with the output projections fitted again,
and distilled from the trained network by the method's own training, with one, two and all three of its losses. One
more row is the trained network after as many more steps on the labels. Groups by similarity are compared with random
groups. Loss in nats per byte is on the last tenth of the text, of the model as it is loaded from its artifact.

Networks of the first seed are timed after all rows, alone: medians of eager forward passes on this machine, dense and
shared in turns; and the engine generates greedily for 8 requests, with the backend that it selects. KV bytes are those
of a token in its paged cache. `--no-latency` leaves this to a run with `--latency-only` and the same `--folder`.
"""

from __future__ import annotations

import argparse
import gzip
import math
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import mean, shared, table
from qat_runs import Grid, Row, add_options, flags, train_cells, work_folder

from smelt.compression.base import MethodContext
from smelt.compression.distillation.losses import Labels
from smelt.compression.distillation.network_training import VALIDATION
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.training_run import process_group
from smelt.compression.methods import METHODS
from smelt.compression.pruning.attention_reuse import AttentionReuse
from smelt.config import parse
from smelt.data import load_text, text_batches
from smelt.errors import ModelError
from smelt.measure.perplexity import perplexity
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.train.trainer.config import OptimizerConfig, TrainConfig
from smelt.train.trainer.trainer import Trainer

CONTEXT = 128
NETWORK = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
SHARES = (1 / 3, 1 / 2)
DISTILLED = {
    "distilled: logits": ["logits"],
    "distilled: logits, maps": ["logits", "attention-map"],
    "distilled: logits, maps, hidden states": ["logits", "attention-map", "hidden-states"],
}
FORMS = ("as it is", "fitted", "random groups, fitted", *DISTILLED)
DENSE, TRAINED_ON = "dense", "dense, trained on"
BASELINES = (DENSE, TRAINED_ON)
TIMED = (DENSE, "fitted")
LENGTHS = (256, 1024)
EPOCHS, BATCH_SIZE, LR = 2, 16, 5e-4  # of distillation
REQUESTS, NEW_TOKENS = 8, 64


def main() -> None:
    options = read_options()
    if options.cells is not None:
        train_cells(options.cells, lambda cell: run_row(cell, options))
        return
    with work_folder(options):
        write_texts(options.folder)
        options.resume |= options.latency_only
        sizes = ("layers", "steps", "samples", "tuning_samples", "limit", "smoke")
        grid = Grid(__file__, options, flags(options, *sizes), key, text)
        if not options.latency_only:
            dense = [cell for cell in cells(options) if cell["row"] == DENSE]
            grid.prepare([cell for cell in dense if not network_folder(cell["seed"], options).exists()])
            grid.run(grid.missing(cells(options)))
        if not options.no_latency:
            first = [cell for cell in cells(options) if cell["seed"] == options.seeds[0]]
            grid.time([{**cell, "timed": True} for cell in first if cell["row"] in TIMED])


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "attention_reuse", seeds=[0, 1, 2], jobs=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--samples", type=int, default=64, help=f"calibration windows of {CONTEXT} bytes")
    parser.add_argument("--tuning-samples", type=int, default=1024, help="windows of an epoch of fine-tuning")
    parser.add_argument("--limit", type=int, default=65536, help="bytes that are scored")
    parser.add_argument("--rows", nargs="+", choices=[*BASELINES, *FORMS], default=[*BASELINES, *FORMS])
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of the layers that have no map")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--no-latency", action="store_true", help="time nothing")
    parser.add_argument("--latency-only", action="store_true", help="time the networks of --folder on this machine")
    parser.add_argument("--smoke", action="store_true", help="a few steps, no results are written")
    options = parser.parse_args()
    if options.latency_only and options.folder is None:
        parser.error("--latency-only needs the --folder of a run with --no-latency")
    if options.smoke:
        options.steps, options.seeds, options.samples, options.limit = 2, [0], 4, 512
        options.tuning_samples, options.layers = 24, 6
    return options


def key(row: Row) -> tuple[str, float, int]:
    return row["row"], row["share"], row["seed"]


def run_row(cell: Row, options: argparse.Namespace) -> Row:
    if cell.get("timed"):
        return {**cell, **measure_times(cell, options)}
    return {**cell, **measure(train(options.folder, cell["seed"], options), cell, options)}


def cells(options: argparse.Namespace) -> list[Row]:
    shared_rows = [(form, share) for share in options.shares for form in FORMS]
    rows = [*((name, 0.0) for name in BASELINES), *shared_rows]
    return [
        {"row": name, "share": share, "seed": seed}
        for seed in options.seeds for name, share in rows if name in options.rows
    ]  # fmt: skip


def write_texts(folder: Path) -> None:
    plays = gzip.decompress((shared() / "data" / "tinyshakespeare" / "input.txt.gz").read_bytes()).decode()
    cut = int(0.9 * len(plays))
    (folder / "train.txt").write_text(plays[:cut])
    (folder / "held_out.txt").write_text(plays[cut:])


def network_folder(seed: int, options: argparse.Namespace) -> Path:
    folder: Path = options.folder / f"{options.layers}-{options.steps}-{seed}" / "model"
    return folder


def artifact_folder(cell: Row, options: argparse.Namespace) -> Path:
    folder: Path = options.folder / "artifacts" / f"{cell['row'].replace(' ', '-')}-{cell['share']:.2f}"
    return folder


def train(folder: Path, seed: int, options: argparse.Namespace) -> Path:
    """Train the network of a seed, unless the folder has it."""
    target = network_folder(seed, options)
    if target.exists():
        return target
    content = {
        "model": {**NETWORK, "num_hidden_layers": options.layers},
        "batch_size": 4 if options.smoke else 16, "seed": seed, "steps": options.steps,
        "data": {"train": str(folder / "train.txt"), "seq_len": CONTEXT}, "max_grad_norm": 1.0, "gradients": "none",
        "optimizer": {"lr": 2e-3, "weight_decay": 0.1, "beta2": 0.95}, "schedule": {"warmup_steps": 30},
        "evaluate": {"samples": 16}, "checkpoint": {"every": None}, "device": options.device.partition(":")[0],
    }  # fmt: skip
    device = torch.device(options.device)
    with process_group(device):
        config = parse(TrainConfig, content, "the configuration")
        Trainer(config, target.parent, device, resume=False, resplit=False).train()
    return target


def measure(source: Path, cell: Row, options: argparse.Namespace) -> Row:
    model, facts, folder = load(source, device=options.device), {}, options.folder
    if cell["row"] == TRAINED_ON:
        train_on(model, windows(model, folder, options.tuning_samples, BATCH_SIZE, cell["seed"] + 100), cell["seed"])
    elif cell["share"]:
        facts = share_maps(model, cell, folder, options)
    with tempfile.TemporaryDirectory() as temporary:
        is_timed = cell["row"] in TIMED and cell["seed"] == options.seeds[0]
        out = artifact_folder(cell, options) if is_timed else Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        save_artifact(model, out)
        again = load(out, device=options.device)
        size = (out / "model.safetensors").stat().st_size
    result = perplexity(again, load_text(folder / "held_out.txt"), context=CONTEXT, batch_size=16, limit=options.limit)
    return {
        "loss": math.log(result.value), "bytes": size, "maps_of": facts.get("maps_of"),
        "divergence": facts.get("map_divergence"),
    }  # fmt: skip


def measure_times(cell: Row, options: argparse.Namespace) -> Row:
    if options.device == "cpu":
        torch.set_num_threads(1)
    model = load(artifact_folder(cell, options), device=options.device)
    times = seconds(model, network_folder(cell["seed"], options), options)
    return {"seconds": times, **served(model, 2 if options.smoke else NEW_TOKENS)}


def share_maps(model: Model, cell: Row, folder: Path, options: argparse.Namespace) -> Row:
    form, step = cell["row"], {"method": "attention-reuse", "layers": cell["share"]}
    seed, samples, batch_size = cell["seed"], options.samples, 4
    if form == "as it is":
        step["repair"] = "none"
    if form in DISTILLED:
        seed, samples, batch_size = seed + 100, options.tuning_samples, BATCH_SIZE
        step |= {"epochs": EPOCHS, "losses": [{"loss": name} for name in DISTILLED[form]], "batch_size": BATCH_SIZE}
        step |= {"optimizer": {"lr": LR}}
    method: Any = METHODS.build(step)
    if form.startswith("random"):
        method = RandomGroups(layers=cell["share"], seed=cell["seed"])
    batches = windows(model, folder, samples, batch_size, seed)
    facts: Row = method.apply(model, MethodContext(batches=batches, seed=cell["seed"]))
    return facts


def train_on(model: Model, batches: list[dict[str, torch.Tensor]], seed: int) -> None:
    """Train the dense network on the labels as long as the others are distilled."""
    samples = Samples.from_batches(batches, model.device, augment=False, seed=seed).split(VALIDATION)
    settings = AttentionReuse(
        epochs=EPOCHS, losses=(Labels(),), batch_size=BATCH_SIZE, optimizer=OptimizerConfig(lr=LR)
    )
    with tempfile.TemporaryDirectory() as work:
        context = MethodContext(batches=batches, seed=seed, folder=Path(work))
        student = Student(model.network, settings.losses, None)
        settings.fine_tune(student, samples, model, context, model.device)


@dataclass(frozen=True)
class RandomGroups(AttentionReuse):
    """Merges random neighbors instead of similar ones."""

    seed: int = 0

    def group(self, anatomy: Any, divergences: np.ndarray) -> dict[int, int]:
        generator = np.random.Generator(np.random.PCG64(self.seed))
        for _ in range(100):
            with suppress(ModelError):  # too few layers can join the groups of this draw
                return super().group(anatomy, generator.random(len(divergences)))
        raise ModelError("no draw of random groups has enough layers.")


def windows(model: Model, folder: Path, samples: int, batch_size: int, seed: int) -> list[dict[str, torch.Tensor]]:
    assert model.tokenizer is not None
    data = load_text(folder / "train.txt")
    return text_batches(data, model.tokenizer, samples=samples, length=CONTEXT, batch_size=batch_size, seed=seed)


def served(model: Model, new_tokens: int) -> Row:
    """Return the KV bytes of a token in the engine, its backend, and the tokens per second that it generates."""
    engine = Engine(model, max_model_len=2 * CONTEXT, kv_cache_bytes=2**26)
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    times = []
    for _ in range(3):
        for request in range(REQUESTS):
            engine.submit([request + 1] * 32, sampling)
        start = time.perf_counter()
        while engine.busy:
            engine.step()
        times.append(time.perf_counter() - start)
    kv_bytes = engine.pool.block_bytes // engine.pool.block_size
    return {
        "kv_bytes": kv_bytes, "backend": engine.backend,
        "tokens_per_second": REQUESTS * new_tokens / statistics.median(times),
    }  # fmt: skip


@torch.inference_mode()
def seconds(model: Model, source: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the median times of a forward pass by length: of the dense network, eager, and of this one."""
    dense = load(source, device=options.device).network
    dense.set_attn_implementation("eager")
    times: dict[str, list[float]] = {}
    for length in LENGTHS[:1] if options.smoke else LENGTHS:
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


def text(rows: list[Row], options: argparse.Namespace) -> str:
    base = {row["seed"]: row for row in rows if row["row"] == DENSE}
    seeds = sorted({row["seed"] for row in rows})
    parts = [
        "# Sharing attention maps in a small decoder\n",
        f"Llama-like, {options.layers} layers of 128 channels and 4 heads, {options.steps} steps on bytes of tiny "
        "Shakespeare. "
        f"Loss in nats per held-out byte, {len(seeds)} seed(s), mean; changes are by seed, relative to the dense "
        "network, which is also the teacher; one row is that network after as many more steps on the labels.\n",
    ]
    lines = []
    for name, share in [(name, 0.0) for name in BASELINES] + [(form, share) for share in SHARES for form in FORMS]:
        same = [row for row in rows if row["row"] == name and row["share"] == share]
        if not same:
            continue
        known = [(row, base[row["seed"]]) for row in same if row["seed"] in base and name != DENSE]
        changes = ", ".join(f"{100 * (row['loss'] / other['loss'] - 1):+.2f} %" for row, other in known)
        groups = [row["maps_of"] for row in same if row["maps_of"]]
        lines.append([
            f"{name}, {share:.2f} of the layers" if share else name, f"{mean([row['loss'] for row in same]):.4f}",
            changes or "-", f"{same[0]['bytes'] / 1e6:.2f}",
            " ".join(f"{layer}:{leader}" for layer, leader in groups[0].items()) if groups else "-",
        ])  # fmt: skip
    parts.append(table(["row", "loss", "change", "MB on disk", "layer:map of (seed 0)"], lines))
    timed = sorted((row for row in rows if row.get("timed")), key=lambda row: row["share"])
    if timed:
        speed = []
        for row in timed:
            pairs = row["seconds"].values()
            times = [f"{1000 * dense:.2f} / {1000 * ours:.2f} ({dense / ours:.2f}x)" for dense, ours in pairs]
            served = f"{row['tokens_per_second']:,.0f} ({row['backend']})"
            speed.append([f"{row['share']:.2f}", f"{row['kv_bytes']:,}", served, *times])
        headings = ["layers without a map", "KV bytes of a token", f"tokens/s, {REQUESTS} greedy requests",
                    *(f"ms of {length} tokens, eager: dense / shared" for length in timed[0]["seconds"])]  # fmt: skip
        parts += ["\nFirst seed, timed alone:\n", table(headings, speed)]
    return "\n".join(parts)


if __name__ == "__main__":
    main()
