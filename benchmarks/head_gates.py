"""Head gates in all-attention networks: perplexity against heads kept, and what each technique does for stability.

    PYTHONPATH=src:benchmarks python benchmarks/head_gates.py [--device cuda] [--jobs 4] [--size medium] [--resume]
        [--texts tinyshakespeare wikitext2] [--seeds 0 1 2] [--steps 1500] [--prune-steps 600] [--folder FOLDER]
        [--no-latency | --latency-only]
    PYTHONPATH=src:benchmarks python benchmarks/head_gates.py --smoke --device cpu --jobs 1

An all-attention decoder on bytes is trained once per text and seed with `smelt.train`. Then, from the same weights:

- gates at fixed coefficients: plain (pi = 0, no warmup, no scaling), each of the three techniques alone, two, and all,
  with noise to the end, as in the paper, and all three with gates that are fixed after half of the steps;
- a budget of heads: gates, fixed after half of the steps (the default) or never, and the baselines that choose heads
  before the training (random, magnitude, Fisher), all trained for the same number of steps on the same windows; all
  heads with these steps besides.

The score is the loss in nats per held-out byte and its exponential. Every result is saved, loaded again and measured as
loaded. After all rows, networks with gates of the first seed are timed against the ones with all heads, in turns;
`--no-latency` leaves this to a run with `--latency-only` and the same `--folder`. Seeds differ in initialization, order
of the data, and noise of the gates. Networks are kept below --folder; `--resume` keeps finished rows.
"""

from __future__ import annotations

import argparse
import gzip
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import shared, table
from qat_runs import Grid, Row, add_options, flags, train_cells, work_folder

from smelt.compression.base import MethodContext
from smelt.compression.distillation.losses import Labels
from smelt.compression.distillation.network_training import VALIDATION
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.training_run import process_group, run_training
from smelt.compression.methods import METHODS
from smelt.config import parse
from smelt.data import Batch, load_text, text_batches
from smelt.errors import BudgetError
from smelt.measure.cost import block_parameters, count_parameters, unit_parameters
from smelt.measure.latency import compare_latency
from smelt.measure.perplexity import perplexity
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.train.trainer.config import CheckpointConfig, EvaluateConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from smelt.train.trainer.tasks import TrainingTask
from smelt.train.trainer.trainer import Trainer

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_persistent_vectors": 64,
    },
    "small": {
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_persistent_vectors": 128,
    },
    "medium": {
        "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_persistent_vectors": 256,
    },
}  # fmt: skip
TEXTS = ("tinyshakespeare", "wikitext2")
PRUNE_LR = 5e-4
OFF = {"initial_logit": 0.0, "penalty_warmup": 0.0, "scale_output": False, "gate_training": 1.0}
ON = {"initial_logit": 2.0, "penalty_warmup": 0.1, "scale_output": True}
FIXED = {"gate_training": 0.5}  # the default of the method
TECHNIQUES: dict[str, tuple[str, ...]] = {
    "plain gates": (),
    "warmup": ("penalty_warmup",),
    "open start": ("initial_logit",),
    "scaled outputs": ("scale_output",),
    "warmup, open start": ("penalty_warmup", "initial_logit"),
    "all three": tuple(ON),
    "all three, fixed halfway": (*ON, *FIXED),
}
DENSE, TRAINED_ON, GATES = "all heads", "all heads, trained on", "head-gates"
NOISY = "head-gates, noise to the end"  # as in the paper
TIMED = (DENSE, GATES)
BASELINES = ("random", "magnitude", "fisher")


def main() -> None:
    options = read_options()
    if options.cells is not None:
        train_cells(options.cells, lambda cell: run_cell(cell, options))
        return
    with work_folder(options):
        for name in options.texts:
            write_text(options.folder, name, 50_000 if options.smoke else None)
        sizes = ("size", "context", "batch_size", "steps", "prune_steps", "windows", "limit")
        options.resume |= options.latency_only
        grid = Grid(__file__, options, flags(options, *sizes), key, text)
        if not options.latency_only:
            dense = [cell for cell in cells(options) if cell["row"] == DENSE]
            missing = grid.missing(dense)
            grid.run([cell for cell in dense if cell in missing or not source(cell, options).exists()])
            grid.run(grid.missing([cell for cell in cells(options) if cell["row"] != DENSE]))
        if not options.no_latency:
            first = [cell for cell in cells(options) if cell["seed"] == options.seeds[0]]
            grid.time([{**cell, "timed": True} for cell in first if cell["row"] in TIMED])


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "head_gates", seeds=[0, 1, 2], jobs=4)
    parser.add_argument("--size", choices=list(SIZES), default="medium")
    parser.add_argument("--context", type=int, default=128, help="bytes of a window")
    parser.add_argument("--batch-size", type=int, default=32, help="windows of a step")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--steps", type=int, default=1500, help="of the network with all heads")
    parser.add_argument("--prune-steps", type=int, default=600, help="with gates, and of baselines after the cut")
    parser.add_argument("--windows", type=int, default=8192, help="of `context` bytes for pruning")
    parser.add_argument("--limit", type=int, default=65536, help="bytes that are scored")
    parser.add_argument("--coefficients", type=float, nargs="*", default=[0.01, 0.03])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.75, 0.5, 0.25], help="shares of the heads")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--no-latency", action="store_true", help="time nothing")
    parser.add_argument("--latency-only", action="store_true", help="time the networks of --folder on this machine")
    parser.add_argument("--smoke", action="store_true", help="a few steps; no results are written")
    options = parser.parse_args()
    if options.latency_only and options.folder is None:
        parser.error("--latency-only needs the --folder of a run with --no-latency")
    if options.smoke:
        options.size, options.texts, options.seeds, options.context, options.batch_size = "tiny", [TEXTS[0]], [0], 32, 4
        options.steps, options.prune_steps, options.windows, options.limit = 3, 2, 80, 512
        options.coefficients, options.budgets = [0.03], [0.5]
    return options


def cells(options: argparse.Namespace) -> list[Row]:
    """Return the rows of every text and seed."""
    kinds: list[Row] = [{"row": DENSE, "setting": "-"}, {"row": TRAINED_ON, "setting": "-"}]
    kinds += [{"row": name, "setting": f"c={value:g}"} for value in options.coefficients for name in TECHNIQUES]
    chosen_by = (GATES, NOISY, *BASELINES)
    kinds += [{"row": name, "setting": f"heads={value:g}"} for value in options.budgets for name in chosen_by]
    return [{"text": name, "seed": seed, **kind} for name in options.texts for seed in options.seeds for kind in kinds]


def key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ("text", "seed", "row", "setting"))


def source(cell: Row, options: argparse.Namespace) -> Path:
    folder: Path = options.folder / f"{cell['text']}-{options.size}-{options.steps}-{cell['seed']}" / "model"
    return folder


def write_text(folder: Path, name: str, limit: int | None) -> None:
    """Write what is trained on and what is scored."""
    data = shared() / "data" / name
    if name == "wikitext2":
        train, held_out = (gzip.decompress((data / f"{part}.txt.gz").read_bytes()) for part in ("train", "test"))
    else:
        plays = gzip.decompress((data / "input.txt.gz").read_bytes())
        train, held_out = plays[: int(0.9 * len(plays))], plays[int(0.9 * len(plays)) :]
    (folder / f"{name}-train.txt").write_bytes(train[:limit])
    (folder / f"{name}-held-out.txt").write_bytes(held_out[:limit])


def run_cell(cell: Row, options: argparse.Namespace) -> Row:
    torch.set_num_threads(1)
    if cell.get("timed"):
        return {**cell, "latency": latency(cell, options)}
    folder, begun = source(cell, options), time.monotonic()
    if cell["row"] == DENSE and not folder.exists():
        train(folder.parent, cell, options)
    model = load(folder, device=options.device)
    facts: Row = {} if cell["row"] == DENSE else prune(model, cell, options)
    seconds = time.monotonic() - begun
    with tempfile.TemporaryDirectory() as temporary:
        is_timed = cell["row"] in TIMED and cell["seed"] == options.seeds[0]
        out = artifact_folder(cell, options) if is_timed else Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        save_artifact(model, out)
        again = load(out, device=options.device)
    held_out = load_text(options.folder / f"{cell['text']}-held-out.txt")
    loss = math.log(perplexity(again, held_out, context=options.context, batch_size=16, limit=options.limit).value)
    heads = [part.units for part in again.anatomy.parts]
    all_heads = sum(part.original_units for part in again.anatomy.parts)
    return {
        **cell, "loss": loss, "heads": heads, "heads_kept": sum(heads) / all_heads,
        "parameters": count_parameters(again.network), "seconds": seconds, **facts,
    }  # fmt: skip


def artifact_folder(cell: Row, options: argparse.Namespace) -> Path:
    name = "-".join([cell["text"], cell["row"], cell["setting"]]).replace(" ", "-").replace("=", "-")
    folder: Path = options.folder / "artifacts" / name
    return folder


def latency(cell: Row, options: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds of a forward pass, and the speedup over the network with all heads with its interval."""
    pruned, dense = artifact_folder(cell, options), source(cell, options)
    timed = compare_latency(
        load(pruned, device=options.device), load(dense, device=options.device), batch=8, length=options.context
    )
    return {"ms": timed.new.median_ms, "speedup": timed.ratio, "low": timed.ratio_low, "high": timed.ratio_high}


def train(out: Path, cell: Row, options: argparse.Namespace) -> None:
    network = {
        "model_type": "all_attention",
        "max_position_embeddings": options.context,
        "dropout": 0.1,
        **SIZES[options.size],
    }
    content = {
        "model": network,
        "data": {"train": str(options.folder / f"{cell['text']}-train.txt"), "seq_len": options.context},
        "batch_size": options.batch_size, "steps": options.steps, "seed": cell["seed"], "max_grad_norm": 1.0,
        "optimizer": {"lr": 2e-3, "weight_decay": 0.1, "beta2": 0.95}, "gradients": "none",
        "schedule": {"warmup_steps": 50, "min_lr_ratio": 0.05}, "precision": precision(options),
        "evaluate": {"samples": 16}, "checkpoint": {"every": None}, "device": options.device.partition(":")[0],
    }  # fmt: skip
    device = torch.device(options.device)
    with process_group(device):
        Trainer(parse(TrainConfig, content, "the configuration"), out, device, resume=False, resplit=False).train()


def precision(options: argparse.Namespace) -> str:
    return "bf16" if options.device.startswith("cuda") else "off"


def prune(model: Model, cell: Row, options: argparse.Namespace) -> Row:
    """Train with gates and remove heads, or remove heads and train; return facts."""
    assert model.tokenizer is not None
    batches = text_batches(
        load_text(options.folder / f"{cell['text']}-train.txt"), model.tokenizer, samples=options.windows,
        length=options.context, batch_size=options.batch_size, seed=cell["seed"],
    )  # fmt: skip
    heads = sum(part.units for part in model.anatomy.parts)
    if cell["row"] in (*TECHNIQUES, GATES, NOISY):
        name, _, value = cell["setting"].partition("=")
        techniques = (*ON, *FIXED) if cell["row"] == GATES else TECHNIQUES.get(cell["row"], tuple(ON))
        chosen = {**OFF, **{each: (ON | FIXED)[each] for each in techniques}}
        size = {"coefficient": float(value)} if name == "c" else {"budget": cell["setting"]}
        step = {
            "method": GATES, **chosen, **size,
            "epochs": options.prune_steps * options.batch_size / (options.windows * (1 - VALIDATION)),
            "batch_size": options.batch_size, "optimizer": {"lr": PRUNE_LR}, "precision": precision(options),
        }  # fmt: skip
        try:
            facts = apply(step, model, batches, cell)
        except BudgetError:  # of a coefficient that closes no gate
            return {}
        logits = [value for layer in facts["gate_logits"] for value in layer]
        return {"gate_logits": facts["gate_logits"], "undecided": sum(abs(value) < 1 for value in logits)}
    if cell["row"] in BASELINES:
        part, total = model.anatomy.parts[0], block_parameters(model.anatomy)
        kept = int(float(cell["setting"].partition("=")[2]) * heads + 0.5)
        keep = 1 - (heads - kept) * unit_parameters(part) / total + 0.1 / total
        layer = 1 - 1 / part.units  # one head of each layer stays, as with gates
        step = {"method": cell["row"], "budget": {"parameters": keep}, "alignment": 1, "max_sparsity": layer}
        step["repair"] = "none"  # the training after it repairs
        apply(step, model, batches[: 512 // options.batch_size], cell)
    fine_tune(model, batches, cell, options)
    return {}


def apply(step: Row, model: Model, batches: list[Batch], cell: Row) -> Row:
    with tempfile.TemporaryDirectory() as work:
        return METHODS.build(step).apply(model, MethodContext(batches=batches, seed=cell["seed"], folder=Path(work)))


def fine_tune(model: Model, batches: list[Batch], cell: Row, options: argparse.Namespace) -> None:
    """Train as the gates' method does, without gates."""
    device = torch.device(options.device)
    samples, validation = Samples.from_batches(batches, device, augment=False, seed=cell["seed"]).split(VALIDATION)
    student = Student(model.network, (Labels(),), None)
    config = TrainConfig(
        model="model", batch_size=options.batch_size, steps=options.prune_steps, seed=cell["seed"], max_grad_norm=0.5,
        optimizer=OptimizerConfig(lr=PRUNE_LR), schedule=ScheduleConfig(name="constant"), gradients="none",
        precision=precision(options), device=device.type, evaluate=EvaluateConfig(samples=256),
        checkpoint=CheckpointConfig(every=None),
    )  # fmt: skip
    task = TrainingTask(student, samples, validation, False, saves_model=False)
    with tempfile.TemporaryDirectory() as work:
        run_training(
            task, lambda: config, Path(work) / "training", device, name="training", select="last",
            progress=MethodContext().progress,
        )  # fmt: skip
    model.network.eval()


def text(rows: list[Row], options: argparse.Namespace) -> str:
    order = {(cell["text"], cell["row"], cell["setting"]): number for number, cell in enumerate(cells(options))}
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        groups.setdefault((row["text"], row["row"], row["setting"]), []).append(row)
    body = []
    for (name, row_name, setting), same in sorted(groups.items(), key=lambda group: order.get(group[0], 10**6)):
        losses, kept = [row["loss"] for row in same], [100 * row["heads_kept"] for row in same]
        timed = [row["latency"] for row in same if "latency" in row]
        speed = ""
        if timed:
            milliseconds, speedup = (statistics.mean(entry[name] for entry in timed) for name in ("ms", "speedup"))
            speed = f"{milliseconds:.2f} ms, {speedup:.2f}x"
        body.append([
            name, row_name, setting, f"{statistics.mean(kept):.0f}", _spread(kept, 0),
            f"{statistics.mean(losses):.4f}", _spread(losses, 4), f"{math.exp(statistics.mean(losses)):.3f}",
            " ".join(map(str, same[0]["heads"])), speed,
        ])  # fmt: skip
    headings = [
        *("text", "heads chosen by", "setting", "% of heads", "by seed", "loss", "by seed", "perplexity per byte"),
        *("heads per layer (first seed)", "forward of 8 windows, against all heads"),
    ]
    sizes = ", ".join(
        f"{value} {name.removeprefix('num_').replace('_', ' ')}" for name, value in SIZES[options.size].items()
    )
    missing = len(cells(options)) - len(rows)
    return (
        "# Head gates in all-attention networks\n\n"
        f"Bytes, windows of {options.context}, {sizes}; {options.steps} steps "
        f"of {options.batch_size} windows (lr 2e-3, cosine, dropout 0.1), then {options.prune_steps} steps (lr "
        f"{PRUNE_LR:g}) with gates, or after the heads of a baseline are removed. Loss in nats per held-out byte "
        f"({options.limit} bytes), measured on the saved network. Techniques: warmup of the penalty over a tenth of "
        "the steps, pi = 2 at the start (plain: 0), heads scaled by heads over open heads. With a budget, "
        "gates are fixed after half of the steps, unless noted. "
        f"Trained on {options.device}."
        + (f" {missing} rows are missing." if missing > 0 else "")
        + "\n\n" + table(headings, body)
    )  # fmt: skip


def _spread(values: list[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


if __name__ == "__main__":
    main()
