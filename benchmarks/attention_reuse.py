"""Share attention maps between layers of a small decoder: loss without training, after a fit, and after distillation.

    PYTHONPATH=src:benchmarks python benchmarks/attention_reuse.py --device cuda [--jobs 6] [--resume]
    PYTHONPATH=src:benchmarks python benchmarks/attention_reuse.py --smoke

A Llama-like network of --layers layers is trained on bytes of tiny Shakespeare with `smelt.train`, once per seed. Then
a third and a half of its layers use the map of another layer: as they are, with the output projections fitted again,
and distilled from the trained network by the method's own training, with one, two and all three of its losses. One
more row is the trained network after as many more steps on the labels. Groups by similarity are compared with random
groups. Loss in nats per byte is on the last tenth of the text, of the model as it is loaded from its artifact.

Seconds are medians of eager forward passes on this machine, dense and shared in turns. KV bytes are those of a token
in the engine's paged cache; the engine then generates greedily for 8 requests, with the backend that it selects.
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
from common import mean, previous_rows, shared, table, write
from qat_runs import add_options, run_cells, train_cells

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
LENGTHS = (256, 1024)
EPOCHS, BATCH_SIZE, LR = 2, 16, 5e-4  # of distillation
REQUESTS, NEW_TOKENS = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "attention_reuse", seeds=[0, 1, 2], jobs=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--samples", type=int, default=64, help=f"calibration windows of {CONTEXT} bytes")
    parser.add_argument("--tuning-samples", type=int, default=1024, help="windows of an epoch of fine-tuning")
    parser.add_argument("--limit", type=int, default=65536, help="bytes that are scored")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="a few steps, no results are written")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.seeds, options.samples, options.limit = 2, [0], 4, 512
        options.tuning_samples, options.layers = 24, 6
    if options.cells is not None:
        train_cells(options.cells, lambda cell: run_row(cell, options))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_texts(folder)
        flags = ["--device", options.device, "--folder", str(folder), "--layers", str(options.layers)]
        for name in ("steps", "samples", "tuning_samples", "limit"):
            flags += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        flags += ["--smoke"] * options.smoke
        rows = [] if options.smoke else previous_rows(options.name, options.resume)
        done = [{name: row[name] for name in ("row", "share", "seed")} for row in rows]
        missing = [cell for cell in cells(options.seeds) if cell not in done]
        networks = [{"row": None, "share": 0.0, "seed": seed} for seed in {cell["seed"] for cell in missing}]
        for _ in run_cells(__file__, [[cell] for cell in networks], options.jobs, flags):
            pass
        parts = [part for index in range(options.jobs) if (part := missing[index :: options.jobs])]
        for row in run_cells(__file__, parts, options.jobs, flags):
            rows.append(row)
            if not options.smoke:
                write(options.name, rows, text(rows, options))
        if options.smoke:
            print(text(rows, options))


def run_row(cell: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    source = train(options.folder, cell["seed"], options)
    return cell if cell["row"] is None else {**cell, **measure(source, cell, options.folder, options)}


def cells(seeds: list[int]) -> list[dict[str, Any]]:
    shared_rows = [(form, share) for share in SHARES for form in FORMS]
    rows = [*((name, 0.0) for name in BASELINES), *shared_rows]
    return [{"row": name, "share": share, "seed": seed} for seed in seeds for name, share in rows]


def write_texts(folder: Path) -> None:
    plays = gzip.decompress((shared() / "data" / "tinyshakespeare" / "input.txt.gz").read_bytes()).decode()
    cut = int(0.9 * len(plays))
    (folder / "train.txt").write_text(plays[:cut])
    (folder / "held_out.txt").write_text(plays[cut:])


def train(folder: Path, seed: int, options: argparse.Namespace) -> Path:
    """Train the network of a seed, unless the folder has it."""
    out = folder / f"{options.layers}-{options.steps}-{seed}"
    if (out / "model" / "config.json").exists():
        return out / "model"
    content = {
        "model": {**NETWORK, "num_hidden_layers": options.layers},
        "batch_size": 4 if options.smoke else 16, "seed": seed, "steps": options.steps,
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
    if cell["row"] == TRAINED_ON:
        train_on(model, windows(model, folder, options.tuning_samples, BATCH_SIZE, cell["seed"] + 100), cell["seed"])
    elif cell["share"]:
        facts = share_maps(model, cell, folder, options)
    with tempfile.TemporaryDirectory() as out:
        save_artifact(model, Path(out))
        again = load(out, device=options.device)
        size = (Path(out) / "model.safetensors").stat().st_size
    result = perplexity(again, load_text(folder / "held_out.txt"), context=CONTEXT, batch_size=16, limit=options.limit)
    timed = cell["row"] in (DENSE, "fitted")
    return {
        "loss": math.log(result.value), "bytes": size, "maps_of": facts.get("maps_of"),
        "divergence": facts.get("map_divergence"), "seconds": seconds(again, source, options) if timed else None,
        **served(again, 2 if options.smoke else NEW_TOKENS),
    }  # fmt: skip


def share_maps(model: Model, cell: dict[str, Any], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
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
    facts: dict[str, Any] = method.apply(model, MethodContext(batches=batches, seed=cell["seed"]))
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


def served(model: Model, new_tokens: int) -> dict[str, Any]:
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


def text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    base = {row["seed"]: row for row in rows if row["row"] == DENSE}
    seeds = sorted({row["seed"] for row in rows})
    parts = [
        "# Sharing attention maps in a small decoder\n",
        f"Llama-like, {options.layers} layers of 128 channels and 4 heads, {options.steps} steps on bytes of tiny "
        "Shakespeare. "
        f"Loss in nats per held-out byte, {len(seeds)} seed(s), mean; changes are by seed, relative to the dense "
        "network, which is also the teacher; one row is that network after as many more steps on the labels. Tokens "
        f"per second are of {REQUESTS} greedy requests in the engine.\n",
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
            changes or "-", f"{same[0]['bytes'] / 1e6:.2f}", f"{same[0]['kv_bytes']:,}",
            f"{mean([row['tokens_per_second'] for row in same]):,.0f} ({same[0]['backend']})",
            " ".join(f"{layer}:{leader}" for layer, leader in groups[0].items()) if groups else "-",
        ])  # fmt: skip
    headings = [
        "row",
        "loss",
        "change",
        "MB on disk",
        "KV bytes of a token",
        "tokens per second",
        "layer:map of (seed 0)",
    ]
    parts.append(table(headings, lines))
    timed = [row for row in rows if row["row"] == "fitted" and row["seconds"]]
    if timed:
        speed = []
        for row in timed:
            pairs = row["seconds"].values()
            times = [f"{1000 * dense:.1f} / {1000 * ours:.1f} ({dense / ours:.2f}x)" for dense, ours in pairs]
            speed.append([f"{row['share']:.2f}", str(row["seed"]), *times])
        parts.append("\nMilliseconds of a forward pass, dense with eager attention / shared:\n")
        parts.append(table(["layers without a map", "seed", *(f"{n} tokens" for n in timed[0]["seconds"])], speed))
    return "\n".join(parts)


if __name__ == "__main__":
    main()
