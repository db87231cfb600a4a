"""Quantizing SmolLM2-135M: WikiText-2 perplexity by method, bits and group size; weight-only, W4A8, W4A4, 2-bit.

    python benchmarks/quantization.py [--seeds 3] [--device cuda] [--tables weights w4a8 ...] [--resume]
    python benchmarks/quantization.py --share 0/8 ... --share 7/8, side by side, and then --join 8

The bundled weights are on a 4-bit grid in groups of 32, which would flatter every 4-bit result: each seed first rotates
the network by a random Hadamard matrix, which preserves its function. All methods see the same calibration windows of
the training split; perplexity is over the first windows of the test split at context 1,024, side by side.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from common import mean, previous_machine, previous_rows, shared, table, write

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import TextData, load_text, text_batches
from smelt.measure.divergence import logit_divergence
from smelt.measure.perplexity import perplexity
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantized import dequantized_weights

CONTEXT, LENGTH, BATCH = 1024, 1024, 8
PROMPTS, PROMPT, ANSWER = 64, 64, 64  # prompts, their length, and the length of the float model's answers
Steps = list[dict[str, Any]]
Rows = dict[tuple[str, str], Steps]  # (row, column) -> what is applied

GROUPS = {"g128": 128, "channel": -1}
LEARNED = {"omniquant": {"epochs": 5}, "flexround": {"iterations": 150}}
REPAIR = {"method": "rilq", "rank": 16, "updates": 150, "accumulation": 1, "rate": 5e-4}
UNROTATED = "from the network as it is: "  # rows with these prefixes do not start from the rotated network


def _weights() -> Rows:
    """Weight-only: methods x bits x group sizes."""
    return {
        (name, f"{bits} bits {label}"): [
            {"method": name, "bits": bits, "group_size": group, "allow_partial_group": True}
        ]
        for name in ("rtn", "hqq", "awq", "gptq")
        for bits in (8, 4, 3, 2)
        for label, group in GROUPS.items()
    }


def _learned() -> Rows:
    """Trained methods, with shorter schedules than in their papers."""
    return {
        (name, f"{bits} bits {label}"): [
            {"method": name, "bits": bits, "group_size": group, "allow_partial_group": True, **LEARNED[name]}
        ]
        for name in LEARNED
        for bits in (4, 3, 2)
        for label, group in GROUPS.items()
    }


def _w4a8() -> Rows:
    column = "W4A8"
    plain = {"bits": 4, "group_size": -1, "input_activations": "int8"}
    rows: dict[str, Steps] = {
        "rtn, int4": [{"method": "rtn", **plain}],
        "rtn, dint4": [{"method": "rtn", "format": "dint4@float16", "input_activations": "int8"}],
        "SmoothQuant, int4": [{"method": "smoothquant", **plain, "symmetric": False}],
        "AWQ, int4": [{"method": "awq", **plain}],
        "AWQ without clipping, int4": [{"method": "awq", "clip": False, **plain}],
        "AQAS, int4": [{"method": "aqas", "denormal": False, "rounding": "rtn"}],
        "AQAS, dint4": [{"method": "aqas", "rounding": "rtn"}],
        "AQAS with clipping, int4": [{"method": "aqas", "denormal": False, "rounding": "rtn", "clip": True}],
        "AQAS with clipping, dint4": [{"method": "aqas", "rounding": "rtn", "clip": True}],
        "gptq, int4": [{"method": "gptq", **plain}],
        "AQAS, int4, gptq": [{"method": "aqas", "denormal": False}],
        "AQAS, dint4, gptq": [{"method": "aqas"}],
    }
    scaled = [name for name in rows if name.startswith(("SmoothQuant", "AWQ", "AQAS")) and "gptq" not in name]
    rows |= {f"{UNROTATED}{name}": rows[name] for name in scaled}
    return {(name, column): steps for name, steps in rows.items()}


def _w4a4() -> Rows:
    column = "W4A4"
    cast = [("mxfp4", "mxfp4"), ("amxfp4", "amxfp4"), ("nvfp4", "nvfp4"), ("int4, a scale a row", "int4@float16")]
    rows: dict[str, Steps] = {
        f"cast to {label}": [{"method": "rtn", "format": name, "input_activations": name, "allow_partial_group": True}]
        for label, name in cast
    }
    plain = {"bits": 4, "group_size": -1, "symmetric": True, "range_search": True, "input_activations": "int4"}
    rows |= {
        f"{UNROTATED}gptq int4, no rotation": [{"method": "gptq", **plain}],
        f"{UNROTATED}QuaRot (gptq)": [{"method": "quarot"}],
        f"{UNROTATED}QuaRot with SpinQuant's settings": [
            {"method": "quarot", "input_activations": "int4-asym", "clip": 1.0, "rotate_heads": False}
        ],
        f"{UNROTATED}SpinQuant (gptq)": [{"method": "spinquant"}],
        f"{UNROTATED}SpinQuant, heads mixed": [{"method": "spinquant", "rotate_heads": True}],
    }
    return {(name, column): steps for name, steps in rows.items()}


def _two_bit() -> Rows:
    bases: dict[str, Steps] = {
        "rtn g64": [{"method": "rtn", "bits": 2, "group_size": 64}],
        "gptq g64": [{"method": "gptq", "bits": 2, "group_size": 64}],
        "omniquant g64": [{"method": "omniquant", "bits": 2, "group_size": 64, **LEARNED["omniquant"]}],
    }
    repaired = {f"{name} + RILQ": [*steps, REPAIR] for name, steps in bases.items()}
    return {(name, "2 bits"): steps for name, steps in (bases | repaired).items()}


def _last_block() -> Rows:
    rows = {}
    for bits, group in ((4, -1), (3, 64)):
        for label, last in (("block-wise", False), ("+ LFQ", True)):
            step = {"method": "flexround", "bits": bits, "group_size": group, "lfq": last, **LEARNED["flexround"]}
            rows[f"flexround {label}", f"{bits} bits"] = [step]
    return rows


EXTRAS = {
    "agreement": "same token on the test split",
    "answer_agreement": "same token in answers",
    "answer_prefix": "tokens before answers part",
}
TABLES = {
    "dense": lambda: {("float32", "float32"): []},
    "weights": _weights,
    "learned": _learned,
    "w4a8": _w4a8,
    "w4a4": _w4a4,
    "two-bit": _two_bit,
    "last-block": _last_block,
}


def main() -> None:
    options = _options()
    before = [row for row in previous_rows("quantization", options.resume) if not _again(row, options.redo)]
    if options.join:
        rows = before + [row for share in range(options.join) for row in previous_rows(f"quantization-{share}", True)]
        write("quantization", _ordered(rows), _text(rows, options), previous_machine("quantization-0"))
        return
    jobs = _without(_jobs(options), before)
    name, rows = "quantization", before
    if options.share is not None:
        name = f"quantization-{options.share[0]}"
        rows = previous_rows(name, options.resume)
        jobs = _without(jobs[options.share[0] :: options.share[1]], rows)
    until = time.monotonic() + options.seconds
    benches: dict[int, _Bench] = {}
    for job in jobs:
        if time.monotonic() > until:
            break
        if job.seed not in benches:
            benches[job.seed] = _Bench(options, job.seed)
        facts = benches[job.seed].run(job)
        if options.device == "cuda":
            torch.cuda.empty_cache()  # for the other shares
        rows.append({"table": job.table, "method": job.method, "column": job.column, "seed": job.seed, **facts})
        print(rows[-1], flush=True)
        write(name, rows, _text(rows, options))


@dataclass(frozen=True)
class _Job:
    """One table cell, for one seed."""

    table: str
    method: str
    column: str
    seed: int
    steps: Steps


def _jobs(options: argparse.Namespace) -> list[_Job]:
    """Return the tables in the requested order."""
    return [
        _Job(name, method, column, seed, steps)
        for name in ("dense", *options.tables)
        for seed in range(options.seeds)
        for (method, column), steps in TABLES[name]().items()
    ]


def _without(jobs: list[_Job], rows: list[dict[str, Any]]) -> list[_Job]:
    done = {(row["table"], row["method"], row["column"], row["seed"]) for row in rows}
    return [job for job in jobs if (job.table, job.method, job.column, job.seed) not in done]


def _ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the rows as a single run would have written them."""
    position = {(name, *key): at for name in TABLES for at, key in enumerate(TABLES[name]())}
    tables = list(TABLES)
    return sorted(
        rows,
        key=lambda row: (row["seed"], tables.index(row["table"]), position[row["table"], row["method"], row["column"]]),
    )


class _Bench:
    """One seed's network, calibration data and evaluation."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.seed, self.tf32 = seed, options.tf32
        train = load_text(shared() / "data/wikitext2/train.txt.gz")
        test = load_text(shared() / "data/wikitext2/test.txt.gz")
        self.plain = load("smollm2-135m", device=options.device)
        self.base = Model(copy.deepcopy(self.plain.network), self.plain.tokenizer, source=self.plain.source)
        METHODS.build({"method": "rotate"}).apply(self.base, MethodContext(seed=seed))
        self.batches = text_batches(
            train, self.base.tokenizer, samples=options.samples, length=LENGTH, batch_size=BATCH, seed=seed
        )
        self.measure = _Measure(self.base, test, options.windows * CONTEXT)
        self.answers = _Answers(self.base, test) if "last-block" in options.tables else None

    def run(self, job: _Job) -> dict[str, Any]:
        start = self.plain if job.method.startswith(UNROTATED) else self.base
        judge = self.answers if job.table == "last-block" else None
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        facts, model = _applied(start, job.steps, MethodContext(batches=self.batches, seed=self.seed))
        torch.set_float32_matmul_precision("highest")
        if model is None:
            return facts
        return {**facts, "tf32": self.tf32, **self.measure(model), **({} if judge is None else judge(model))}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64, help=f"calibration windows of {LENGTH} tokens")
    parser.add_argument("--windows", type=int, default=64, help=f"test windows of {CONTEXT} tokens")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES)[1:], default=list(TABLES)[1:])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--tf32", action="store_true", help="matrix products of the methods in TF32; never the measures"
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further row after so long")
    parser.add_argument("--redo", nargs="+", default=[], help="with --resume: measure methods with these words anew")
    parser.add_argument("--share", type=_share, help="I/N: every N-th cell from the I-th on, into a file of its own")
    parser.add_argument("--join", type=int, help="put the files of so many shares together")
    parser.add_argument("--resume", action="store_true", help="keep the rows of a run that was cut off")
    return parser.parse_args()


def _share(text: str) -> tuple[int, int]:
    place, count = (int(part) for part in text.split("/"))
    return place, count


def _again(row: dict[str, Any], words: list[str]) -> bool:
    """Rows that failed, or came from an older version of the code, are measured again."""
    return "failed" in row or any(word in row["method"] for word in words)


class _Measure:
    """Measure perplexity, and how often the top token is the float model's."""

    def __init__(self, base: Model, test: TextData, limit: int) -> None:
        self.base, self.test, self.limit = base, test, limit

    def __call__(self, model: Model) -> dict[str, float]:
        with dequantized_weights(model.network, torch.float32):
            value = perplexity(model, self.test, context=CONTEXT, limit=self.limit, batch_size=BATCH).value
            apart = logit_divergence(
                model, self.base, self.test, context=CONTEXT, limit=min(self.limit, 16 * CONTEXT), batch_size=BATCH
            )
        return {"perplexity": value, "agreement": apart.agreement, "kl": apart.kl}


class _Answers:
    """The float model's greedy answers, and how a quantized model agrees with them."""

    def __init__(self, base: Model, test: TextData) -> None:
        tokens = base.tokenizer(test.joined, verbose=False)["input_ids"]
        starts = range(0, len(tokens) - PROMPT, len(tokens) // PROMPTS)[:PROMPTS]
        self.prompts = torch.tensor([tokens[start : start + PROMPT] for start in starts], device=base.device)
        self.given = self._generated(base)  # [prompts, prompt and answer]

    @torch.no_grad()
    def _generated(self, model: Model) -> torch.Tensor:
        settings = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False}
        mask = torch.ones_like(self.prompts)
        result: torch.Tensor = model.network.generate(self.prompts, attention_mask=mask, **settings)
        return result

    @torch.no_grad()
    def __call__(self, model: Model) -> dict[str, float]:
        """Return the fraction of answer tokens that the model ranks first after the same text, and the length of the
        common prefix of its own answers and the float model's."""
        with dequantized_weights(model.network, torch.float32):
            logits = model.network(self.given).logits[:, PROMPT - 1 : -1]
            own = self._generated(model)
        same = (own == self.given)[:, PROMPT:].cumprod(1).sum(1)
        right = logits.argmax(-1) == self.given[:, PROMPT:]
        return {"answer_agreement": right.double().mean().item(), "answer_prefix": same.double().mean().item()}


def _applied(base: Model, steps: Steps, context: MethodContext) -> tuple[dict[str, Any], Model | None]:
    """Record a failed row and continue with the others."""
    model = Model(copy.deepcopy(base.network), base.tokenizer, source="smollm2-135m")
    start = time.perf_counter()
    bits = None
    try:
        for step in steps:
            facts = METHODS.build(step).apply(model, context)
            bits = facts.get("bits_per_weight", bits)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}, None
    return {"seconds": time.perf_counter() - start, "bits_per_weight": bits}, model


def _text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    dense = [row["perplexity"] for row in rows if row["table"] == "dense"]
    reference = f"{mean(dense):.2f}" if dense else "not measured here"
    seeds = 1 + max(row["seed"] for row in rows)
    text = (
        "# SmolLM2-135M on WikiText-2, quantized: perplexity\n\n"
        f"Mean of up to {seeds} seeds and (lowest-highest); float32 {reference}. Each seed first rotates the "
        "network (its function stays), so that the grid of the bundled weights helps nobody. "
        f"{options.samples} windows of {LENGTH} tokens of the training split for every method; the first "
        f"{options.windows} windows of {CONTEXT} tokens of the test split. "
        "Embeddings, norms and head stay in float32. Groups of 128 do not divide 576: the last one is shorter. "
        f"{sum(bool(row.get('tf32')) for row in rows)} of {len(rows)} cells had the methods' own products in TF32, "
        "the others in float32 (each row of the JSON file says which); measures are always in float32.\n"
    )
    for name in TABLES:
        here = [row for row in rows if row["table"] == name]
        if here and name != "dense":
            text += f"\n## {name}\n\n" + _table(here, EXTRAS if name == "last-block" else {}) + "\n"
    return text


def _table(rows: list[dict[str, Any]], extras: dict[str, str]) -> str:
    columns = list(dict.fromkeys(row["column"] for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))

    def cell(name: str, column: str, key: str, digits: int) -> str:
        here = [row for row in rows if row["method"] == name and row["column"] == column]
        results = [row[key] for row in here if key in row]
        if not results:
            return "failed" if here else ""
        spread = f" ({min(results):.{digits}f}-{max(results):.{digits}f})" if len(results) > 1 else ""
        return f"{mean(results):.{digits}f}{spread}"

    wanted = [("perplexity", "", 2), *((key, f": {told}", 4) for key, told in extras.items())]
    headings = ["method", *(f"{column}{told}" for _, told, _ in wanted for column in columns)]
    cells = [
        [name, *(cell(name, column, key, digits) for key, _, digits in wanted for column in columns)] for name in names
    ]
    return table(headings, cells)


if __name__ == "__main__":
    main()
