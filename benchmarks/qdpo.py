"""QDPO of SmolLM2-135M-Instruct at 4 bits: flips, the first flip, and what the 16-bit model prefers, three seeds.

    PYTHONPATH=src:benchmarks python benchmarks/qdpo.py [--device cuda] [--jobs 4] [--seeds 0 1 2] [--format FORMAT]
    PYTHONPATH=src:benchmarks python benchmarks/qdpo.py --smoke     (tiny model on CPU; writes no results)

The bundled weights lie on a 4-bit grid, so each seed first rotates the network by a random Hadamard matrix, which
preserves its function. Prompts are the dialogues of HH-RLHF without their last answer. Both models answer the training
prompts greedily once per seed, and all rows train on these answers with the same number of steps: QDPO on the pairs,
with and without the reference and with the loss of the chosen answer added (rpo_alpha 1), the controls on the 16-bit
model's answers alone: SFT (cross-entropy) and KD (KL of all tokens). Each row is run with two learning rates.

On held-out prompts, all with the packed network:
- flip rate: share of the tokens of the 16-bit model's answers where the row's most likely token is another one;
- first flip: tokens before the row's own greedy answer differs; and the share of answers that do not;
- log-probability: mean over answers of the 16-bit model's log-probability per token of the row's own answer, and how
  often it prefers that to the answer of the untrained quantized model, ties half. The 16-bit model judges answers that
  imitate it: this is no independent judge.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from common import previous_rows, shared, table, write
from qat_runs import Row, print_row, run_cell
from torch import Tensor

from smelt.compression.base import Batch, MethodContext
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.distillation.losses import IGNORED
from smelt.compression.distillation.qdpo import Qdpo, common_prefix
from smelt.compression.methods import METHODS
from smelt.compression.recipe.inputs import calibration_batches
from smelt.compression.recipe.recipe import CalibrationSettings
from smelt.data import load_prompts
from smelt.models.generation import generate
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantized import dequantized_weights

RATES = (1e-6, 1e-5)
UNTRAINED = "rounded to nearest"
TRAINED = ("SFT", "KD", "QDPO", "QDPO without the reference", "QDPO + NLL of the chosen answer")


def main() -> None:
    options = parse()
    if options.cell is not None:
        print_row(run_row(json.loads(options.cell), options))
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        options.folder.mkdir(parents=True, exist_ok=True)
        rows = previous_rows(options.name, options.resume)
        done = [key(row) for row in rows]
        others = [
            cell
            for lr in options.rates for seed in options.seeds for name in TRAINED
            if key(cell := {"row": name, "seed": seed, "lr": lr}) not in done
        ]  # fmt: skip
        first = [{"row": UNTRAINED, "seed": seed} for seed in sorted({cell["seed"] for cell in others})]
        rows = [row for row in rows if key(row) not in map(key, first)]
        with ThreadPoolExecutor(options.jobs) as pool:
            for cells in (first, others):  # the pairs of a seed are generated with its untrained row
                for future in as_completed(pool.submit(run_process, cell, options) for cell in cells):
                    rows.append(future.result())
                    rows.sort(key=lambda row: (row.get("lr", 0.0), row["row"], row["seed"]))
                    if not options.smoke:
                        write(options.name, rows, describe(rows, options))
        if options.smoke:
            print(describe(rows, options))


def key(row: Row) -> tuple[str, int, float | None]:
    return row["row"], row["seed"], row.get("lr")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--format", default="int4-asym/64@float16", help="of the weights")
    parser.add_argument("--prompts", type=int, default=1280, help="to train on")
    parser.add_argument("--held-out", type=int, default=256, help="prompts to measure on")
    parser.add_argument("--prompt-tokens", type=int, default=192, help="longer prompts are left out")
    parser.add_argument("--answer-tokens", type=int, default=128, help="at most")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=4, help="rows that are trained at the same time")
    parser.add_argument("--compile", action="store_true", help="train by torch.compile")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--smoke", action="store_true", help="a tiny model; nothing is written")
    parser.add_argument(
        "--folder", type=Path, help="for pairs and finished rows; kept if given, and then a cut-off run goes on"
    )
    parser.add_argument("--name", default="qdpo", help="of the results file")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # one row in this process
    options = parser.parse_args()
    if options.smoke:
        tiny = {"model": str(shared() / "weights" / "stories260K"), "format": "int3-asym/4@float16", "prompts": 24,
                "held_out": 8, "prompt_tokens": 300, "answer_tokens": 12, "rates": [1e-4], "seeds": [0],
                "device": "cpu", "jobs": 1}  # fmt: skip
        vars(options).update(tiny)
    return options


def run_process(cell: Row, options: argparse.Namespace) -> Row:
    """Run a row in a process of its own."""
    keys = ("device", "model", "format", "prompts", "held_out", "prompt_tokens", "answer_tokens", "folder")
    flags = [part for key in keys for part in (f"--{key.replace('_', '-')}", str(getattr(options, key)))]
    flags += ["--smoke"] * options.smoke + ["--compile"] * options.compile
    row = run_cell(__file__, json.dumps(cell), flags, options.folder)
    if "failed" in row:
        raise SystemExit(f"{cell} failed:\n{row['failed']}")
    return row


def run_row(cell: Row, options: argparse.Namespace) -> Row:
    torch.set_float32_matmul_precision("high")
    seed, folder = cell["seed"], options.folder / f"seed-{cell['seed']}"
    model = load(options.model, device=options.device, dtype=torch.float32)
    METHODS.build({"method": "rotate"}).apply(model, MethodContext(seed=seed))
    dense = copy.deepcopy(model.network).eval()
    train, held_out = prompt_batches(model, seed, options)
    begun = time.perf_counter()
    if cell["row"] == UNTRAINED:
        method = METHODS.build(step("QDPO", 1e-6, options))
        assert isinstance(method, Qdpo)
        Checkpoint(folder).save("pairs", method.make_pairs(model, MethodContext(batches=train, seed=seed)))
        METHODS.build({"method": "rtn", "format": options.format}).apply(model, MethodContext())
        facts: Row = {"pairs": len(pairs_of(folder)["input_ids"])}
    else:
        facts = train_row(cell, model, train, folder, options)
    facts["seconds"] = time.perf_counter() - begun
    return {**cell, **facts, **measure(model, dense, held_out, folder, cell["row"] == UNTRAINED, options)}


def prompt_batches(model: Model, seed: int, options: argparse.Namespace) -> tuple[list[Batch], list[Batch]]:
    """Return training prompts and held-out ones, in batches of 64."""
    count = options.prompts + options.held_out
    settings = CalibrationSettings(source="hh_rlhf", samples=count, seq_len=options.prompt_tokens, batch_size=64)
    data = load_prompts(shared() / "data/hh_rlhf_harmless_test/test.jsonl.gz")
    rows = [row[mask.bool()] for batch in calibration_batches(settings, data, model, seed)
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]  # fmt: skip
    return padded(rows[options.held_out :]), padded(rows[: options.held_out])


def padded(rows: list[Tensor]) -> list[Batch]:
    batches = []
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        masks = [torch.ones_like(row) for row in part]
        batches.append({
            name: torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
            for name, each in (("input_ids", part), ("attention_mask", masks))
        })  # fmt: skip
    return batches


def step(row: str, lr: float, options: argparse.Namespace) -> Row:
    """Return the step of a recipe."""
    weights = {"quantizer": "minmax", "weight_format": options.format}
    precision = "bf16" if options.device == "cuda" else "off"
    training = {"weights": weights, "batch_size": 8, "epochs": 1.0, "optimizer": {"lr": lr}, "precision": precision,
                "select": "last", "checkpoint_every": 1_000_000, "compile": options.compile}  # fmt: skip
    if row in ("SFT", "KD"):
        loss = {"losses": [{"loss": "logits"}], "teacher": "source"} if row == "KD" else {}
        return {"method": "qat", **training, **loss, "schedule": {"warmup_steps": round(0.1 * options.prompts / 8)}}
    generation = {"max_new_tokens": options.answer_tokens, "generation_batch_size": 256}
    return {"method": "qdpo", **training, **generation, "rpo_alpha": float("NLL" in row)}


def pairs_of(folder: Path) -> Batch:
    pairs = Checkpoint(folder).load("pairs")
    assert pairs is not None
    return pairs


def train_row(cell: Row, model: Model, train: list[Batch], folder: Path, options: argparse.Namespace) -> Row:
    method = METHODS.build(step(cell["row"], cell["lr"], options))
    with tempfile.TemporaryDirectory() as temporary:
        work, pairs = Checkpoint(Path(temporary) / "work"), pairs_of(folder)
        batches = train
        if cell["row"] in ("SFT", "KD"):
            batches = [chosen_answers(pairs)]
        elif cell["row"] == "QDPO without the reference":
            work.save("pairs", {**pairs, "reference": torch.zeros_like(pairs["reference"])})
        else:
            (Path(temporary) / "work").mkdir()
            shutil.copy(folder / "pairs.safetensors", Path(temporary) / "work")
        context = MethodContext(batches=batches, seed=cell["seed"], folder=Path(temporary), checkpoint=work)
        facts = method.apply(model, context)
    return {name: facts[name] for name in ("steps", "final_loss", "conversion_error")}


def chosen_answers(pairs: Batch) -> Batch:
    """Return the 16-bit model's answers with their prompts, of which only the answers are labels."""
    ids, mask, labels = (pairs[name][:, 0] for name in ("input_ids", "attention_mask", "labels"))
    starts = (labels != IGNORED).int().argmax(-1) - pairs["first_flip"]
    positions = torch.arange(ids.shape[1])
    answer = (positions >= starts[:, None]) & mask.bool()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~answer, IGNORED)}


@torch.no_grad()
def measure(
    model: Model, dense: Any, batches: list[Batch], folder: Path, untrained: bool, options: argparse.Namespace
) -> Row:
    """Compare with the 16-bit model's answers, which are generated with the untrained row of a seed and kept."""
    prompts = [row[mask.bool()].tolist() for batch in batches
               for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]  # fmt: skip
    kept = folder / "untrained.json"
    with dequantized_weights(model.network, torch.float32):
        reference = generate(dense, prompts, options.answer_tokens, batch_size=256) if untrained else []
        reference = reference or json.loads(kept.read_text())["reference"]
        answers = generate(model.network, prompts, options.answer_tokens, batch_size=256)
        ours, theirs = (most_likely_tokens(each, prompts, reference) for each in (model.network, dense))
    flips = [float(own != other) for pair in zip(ours, theirs, strict=True) for own, other in zip(*pair, strict=True)]
    prefixes = [common_prefix(one, other) for one, other in zip(answers, reference, strict=True)]
    scores = mean_log_probs(dense, prompts, answers)
    if untrained:
        kept.write_text(json.dumps({"reference": reference, "scores": scores}))
    base = json.loads(kept.read_text())["scores"]
    preferred = [0.5 if new == old else float(new > old) for new, old in zip(scores, base, strict=True)]
    return {
        "flip_rate": statistics.mean(flips),
        "first_flip": statistics.mean(prefixes),
        "same_answers": statistics.mean(float(one == other) for one, other in zip(answers, reference, strict=True)),
        "log_prob": statistics.mean(scores),
        "reference_log_prob": statistics.mean(mean_log_probs(dense, prompts, reference)),
        "preferred": statistics.mean(preferred),
    }


def logits_of_answers(network: Any, prompts: list[list[int]], answers: list[list[int]]) -> Iterator[Tensor]:
    """Yield for each answer the logits of its tokens, [tokens, vocabulary]; later padding changes none of them."""
    for start in range(0, len(prompts), 32):
        part = list(zip(prompts[start : start + 32], answers[start : start + 32], strict=True))
        (batch,) = padded([torch.tensor(prompt + answer) for prompt, answer in part])
        logits = network(**{name: tensor.to(network.device) for name, tensor in batch.items()}, use_cache=False).logits
        for row, (prompt, answer) in zip(logits, part, strict=True):
            yield row[len(prompt) - 1 : len(prompt) + len(answer) - 1]


def most_likely_tokens(network: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    return [logits.argmax(-1).tolist() for logits in logits_of_answers(network, prompts, answers)]


def mean_log_probs(dense: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
    """Return the 16-bit model's log-probability of each answer per token."""
    means = []
    for logits, answer in zip(logits_of_answers(dense, prompts, answers), answers, strict=True):
        log_probs = logits.float().log_softmax(-1)
        means.append(float(log_probs.gather(-1, torch.tensor(answer, device=logits.device)[:, None]).mean()))
    return means


def describe(rows: list[Row], options: argparse.Namespace) -> str:
    cells = []
    for name, lr in dict.fromkeys((row["row"], row.get("lr")) for row in rows):
        same = [row for row in rows if (row["row"], row.get("lr")) == (name, lr)]
        spread = [
            f"{statistics.mean(scale * row[key] for row in same):.{digits}f} ("
            f"{min(scale * row[key] for row in same):.{digits}f} to {max(scale * row[key] for row in same):.{digits}f})"
            for key, scale, digits in (("flip_rate", 100, 2), ("first_flip", 1, 1), ("same_answers", 100, 1),
                                       ("log_prob", 1, 4), ("preferred", 100, 1))
        ]  # fmt: skip
        cells.append([name, "" if lr is None else f"{lr:g}", *spread, str(len(same))])
    headings = ["row", "lr", "flips, %", "tokens before the first flip", "same answers, %", "log-probability",
                "preferred to untrained, %", "seeds"]  # fmt: skip
    reference = statistics.mean(row["reference_log_prob"] for row in rows)
    return (
        f"# QDPO of SmolLM2-135M-Instruct, {options.format}\n\nMean over seeds (lowest to highest). "
        f"{options.prompts:,} prompts of HH-RLHF to train on, {options.held_out} held out, answers of at most "
        f"{options.answer_tokens} tokens. The 16-bit model's own answers have a log-probability of {reference:.4f} per "
        "token. It judges answers that imitate it: no independent judge.\n\n" + table(headings, cells)
    )


if __name__ == "__main__":
    main()
