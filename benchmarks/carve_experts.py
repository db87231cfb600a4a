"""Experts carved out of SmolLM2-135M (Read-ME): perplexity per domain against pruned widths, and serving.

    PYTHONPATH=src:benchmarks python benchmarks/carve_experts.py [--device cuda] [--jobs 4] [--resume]
        [--parts quality serving]
    PYTHONPATH=src:benchmarks python benchmarks/carve_experts.py --smoke --device cpu --jobs 1
    PYTHONPATH=src:benchmarks python benchmarks/carve_experts.py --small --device cpu --jobs 1 --name carve_experts_cpu

Quality: half of every feed-forward stays for a token. Carved experts, one per domain, against one half for all domains:
the most active neurons, the largest weights, or Fisher information. All rows, and the unpruned network, then train on
the same sequences for the same steps; the paper trains on 1B tokens, the caption counts those here.
`one half` has the statistics of carve-experts and no routing. Perplexity is that of held-out text of each domain.

Serving: the source, the carved network of the first seed and the one of `one half` answer prompts of all domains with
the arrivals and lengths of a production trace (Azure LLM inference 2023, conversations), scaled. Experts are all
resident, compiled or not, or a few at a time under each policy, which runs eagerly. Hit rates of longer looks ahead are
simulated on the experts that the steps of the resident run used. `--small` takes stories260K, which a CPU can train;
`--smoke` writes no results.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import previous_rows, shared, table, write
from qat_runs import Row, add_options, run_cells, train_cells

from smelt.compression.base import MethodContext
from smelt.compression.calibration.domain_neurons import feed_forwards, measure_importance
from smelt.compression.distillation.network_training import VALIDATION
from smelt.compression.distillation.samples import Samples
from smelt.compression.methods import METHODS
from smelt.compression.pruning.carve_experts import choose_channels
from smelt.data.text import load_text
from smelt.measure.cost import active_parameters, count_parameters
from smelt.measure.perplexity import perplexity
from smelt.models.artifact import save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.surgery import keep_units
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.expert_cache import EXPERT_POLICIES, simulate
from smelt.serve.engine.request import Request
from smelt.serve.engine.sampling_params import SamplingParams

DOMAINS = ("wikitext", "code", "gsm8k", "german", "dialogue")
SOURCE, DENSE, CARVED, ONE_HALF = "source", "all channels", "carve-experts", "one half"
QUALITY = (SOURCE, DENSE, CARVED, ONE_HALF, "magnitude", "fisher")
PARTS = ("quality", "serving")
WIDTH = 0.5
RESIDENT = "all experts resident"
SERVED: dict[str, dict[str, Any]] = {
    SOURCE: {},
    ONE_HALF: {},
    RESIDENT: {},
    f"{ONE_HALF}, eager": {"compiled": False},
    f"{RESIDENT}, eager": {"compiled": False},
    "Belady, ahead, batched by expert": {"expert_policy": "belady"},
    "Belady, ahead, plain order": {"expert_policy": "belady", "expert_batching": False},
    "LRU, ahead, plain order": {"expert_policy": "lru", "expert_batching": False},
    "random, ahead, plain order": {"expert_policy": "random", "expert_batching": False},
    "LRU, on demand, plain order": {"expert_policy": "lru", "expert_batching": False, "expert_prefetch": False},
}
SIZES = {
    "full": {"model": "smollm2-135m", "samples": 256, "seq_len": 256, "epochs": 2.0, "router_epochs": 4.0,
             "tokens": 16384, "requests": 192, "rate": 24.0, "max_prompt": 512, "max_output": 64, "batch": 16},
    "small": {"model": "stories260K", "samples": 96, "seq_len": 128, "epochs": 3.0, "router_epochs": 4.0,
              "tokens": 8192, "requests": 48, "rate": 8.0, "max_prompt": 128, "max_output": 32, "batch": 16},
    "smoke": {"model": "stories260K", "samples": 8, "seq_len": 64, "epochs": 1.0, "router_epochs": 1.0,
              "tokens": 512, "requests": 6, "rate": 50.0, "max_prompt": 32, "max_output": 6, "batch": 4},
}  # fmt: skip


def main() -> None:
    options = read_options()
    if options.cells is not None:
        train_cells(options.cells, lambda cell: run_cell(cell, options))
        return
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        options.folder.mkdir(parents=True, exist_ok=True)
        write_domains(options.folder)
        flags = ["--device", options.device, "--folder", str(options.folder), "--size", options.size]
        flags += ["--slots", str(options.slots)]
        rows = previous_rows(options.name, options.resume)
        done = {(row["row"], row["seed"]) for row in rows if "perplexity" in row}
        if options.resume and not all((options.folder / name).exists() for name in ("carved", "half")):
            done -= {(name, options.seeds[0]) for name in (CARVED, ONE_HALF)}  # their networks are served
            rows = [row for row in rows if "served" in row or (row["row"], row["seed"]) in done]
        cells = [
            {"row": name, "seed": seed}
            for seed in options.seeds
            for name in QUALITY
            if seed == options.seeds[0] or name != SOURCE
        ]
        cells = [cell for cell in cells if (cell["row"], cell["seed"]) not in done and "quality" in options.parts]
        parts = [part for index in range(options.jobs) if (part := cells[index :: options.jobs])]
        for row in run_cells(__file__, parts, options.jobs, flags):
            rows.append(row)
            finish(rows, options)
        served = {row["served"] for row in rows if "served" in row}
        missing = [{"served": name, "seed": options.seeds[0]} for name in SERVED if name not in served]
        if "serving" not in options.parts:
            return
        for row in run_cells(__file__, [missing] if missing else [], 1, flags):  # alone on the device
            rows.append(row)
            finish(rows, options)
        print(text(rows, options))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "carve_experts", seeds=[0, 1, 2], jobs=4)
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--slots", type=int, default=2, help="experts on the device at a time")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the results file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="of the rows")
    parser.add_argument("--small", action="store_true", help="stories260K, for a CPU")
    parser.add_argument("--smoke", action="store_true", help="a few sequences; no results are written")
    options = parser.parse_args()
    if options.small or options.smoke:
        options.size = "small" if options.small else "smoke"
    if options.smoke:
        options.seeds = [0]
    vars(options).update(SIZES[options.size])
    return options


def finish(rows: list[Row], options: argparse.Namespace) -> None:
    if options.size != "smoke":
        write(options.name, rows, text(rows, options))


def write_domains(folder: Path) -> None:
    """Write a text to train on and a held-out text of each domain."""
    data = shared() / "data"

    def rows(name: str, *columns: str) -> list[str]:
        lines = gzip.decompress((data / name).read_bytes()).decode().splitlines()
        return ["\n".join(json.loads(line)[column] for column in columns) for line in lines]

    code, dialogue = rows("code_eval/mbpp.jsonl.gz", "code"), rows("hh_rlhf_harmless_test/test.jsonl.gz", "chosen")
    texts = {
        "wikitext": [[gzip.decompress((data / f"wikitext2/{part}.txt.gz").read_bytes()).decode()[:2_000_000]]
                     for part in ("train", "test")],
        "code": [code[: 4 * len(code) // 5], code[4 * len(code) // 5 :]],
        "gsm8k": [rows(f"gsm8k/{part}.jsonl.gz", "question", "answer") for part in ("train", "test")],
        "german": [rows(f"multi30k_en_de/{part}.jsonl.gz", "de") for part in ("train", "test2016")],
        "dialogue": [dialogue[: 4 * len(dialogue) // 5], dialogue[4 * len(dialogue) // 5 :]],
    }  # fmt: skip
    for name, (train, held_out) in texts.items():
        (folder / f"{name}.txt").write_text("\n\n".join(train))
        (folder / f"{name}-held-out.txt").write_text("\n\n".join(held_out))


def run_cell(cell: Row, options: argparse.Namespace) -> Row:
    if options.device == "cpu":
        torch.set_num_threads(1)
    if "served" in cell:
        return {**cell, **serve(cell["served"], options)}
    begun = time.perf_counter()
    model = source_model(options)
    facts = prepare(model, cell, options)
    return {
        **cell, **facts, "perplexity": {name: held_out_perplexity(model, name, options) for name in DOMAINS},
        "parameters": count_parameters(model.network), "active_parameters": active_parameters(model.anatomy),
        "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def source_model(options: argparse.Namespace, dtype: torch.dtype = torch.float32) -> Model:
    name = str(shared() / "weights" / options.model) if options.model == "stories260K" else options.model
    return load(name, device=options.device, dtype=dtype)


def prepare(model: Model, cell: Row, options: argparse.Namespace) -> Row:
    """Carve or prune the network and train it; return facts."""
    if cell["row"] == SOURCE:
        return {}
    method: Any = METHODS.build({
        "method": "carve-experts", "domains": [str(options.folder / f"{name}.txt") for name in DOMAINS],
        "width": WIDTH, "samples": options.samples, "seq_len": options.seq_len, "epochs": options.epochs,
        "router_epochs": options.router_epochs, "batch_size": options.batch, "select": "last",
        "optimizer": {"lr": 1e-4 if options.size == "full" else 1e-3, "weight_decay": 0.01},
        "precision": "bf16" if options.device.startswith("cuda") else "off", "checkpoint_every": 1_000_000,
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        context = MethodContext(seed=cell["seed"], folder=Path(work))
        if cell["row"] == CARVED:
            facts = method.apply(model, context)
            kept = ("steps", "final_loss", "shared_channels", "expert_channels", "mask_stability", "routed_shares",
                    "domain_shares", "router_validation_loss")  # fmt: skip
            facts = {name: facts[name] for name in kept}
            facts["domain_shares"] = dict(zip(DOMAINS, facts["domain_shares"].values(), strict=True))
        else:
            facts = train_pruned(model, method, cell, context)
        if cell["seed"] == options.seeds[0] and cell["row"] in (CARVED, ONE_HALF):
            target = options.folder / ("carved" if cell["row"] == CARVED else "half")
            target.mkdir(exist_ok=True)
            save_artifact(model, target)
    return facts


def train_pruned(model: Model, method: Any, cell: Row, context: MethodContext) -> Row:
    """Keep one half of the channels for all domains, and train as the experts train."""
    data = method.read_domains(model, cell["seed"])
    batches = [batch for domain in data for batch in domain]
    if cell["row"] != DENSE:
        scores = channel_scores(model, cell["row"], data, cell["seed"])
        for part, values in zip(feed_forwards(model.anatomy), scores, strict=True):
            best = torch.argsort(torch.as_tensor(values), descending=True)[: int(WIDTH * part.units)]
            keep_units(model.network, part, sorted(best.tolist()))
    samples = Samples.from_batches(batches, model.device, augment=False, seed=cell["seed"])
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(cell["seed"])).to(model.device)
    samples, validation = Samples({name: tensor[order] for name, tensor in samples.tensors.items()}).split(VALIDATION)
    facts = method.train_experts(model, None, samples, validation, context)
    model.network.eval()
    return {name: facts[name] for name in ("steps", "final_loss")}


def channel_scores(model: Model, name: str, data: Sequence[Sequence[Any]], seed: int) -> list[Any]:
    """Return how important each channel is to all domains, by feed-forward."""
    if name == ONE_HALF:
        importance, _ = measure_importance(model.anatomy, data, WIDTH, list)
        (channels,) = [choose_channels(importance, [range(len(data))] * 2, WIDTH)]
        return [
            torch.zeros(part.units).index_fill(0, torch.tensor(layer.shared), 1.0)
            for part, layer in zip(feed_forwards(model.anatomy), channels, strict=True)
        ]
    step: Any = METHODS.build({"method": name, "budget": {"parameters": WIDTH}})
    few = [batch for domain in data for batch in domain[:16]]
    context = MethodContext(batches=few, seed=seed)
    scores = step.scores(model.anatomy, step.observe(model.anatomy, context), context)
    return [values for part, values in zip(model.anatomy.parts, scores, strict=True) if part.kind == "ffn_channels"]


def held_out_perplexity(model: Model, name: str, options: argparse.Namespace) -> float:
    held_out = load_text(options.folder / f"{name}-held-out.txt")
    return float(perplexity(model, held_out, context=options.seq_len, batch_size=8, limit=options.tokens).value)


def serve(name: str, options: argparse.Namespace) -> Row:
    """Answer the requests of the trace in the engine; return latencies, throughput and counts."""
    is_carved = not name.startswith((SOURCE, ONE_HALF))
    slots = {"expert_slots": options.slots} if is_carved and not name.startswith(RESIDENT) else {}
    longest = options.max_prompt + options.max_output
    dtype = torch.bfloat16 if options.device.startswith("cuda") else torch.float32
    if name == SOURCE:
        model = source_model(options, dtype)
    else:
        folder = str(options.folder / ("carved" if is_carved else "half"))
        model = load(folder, device=options.device, dtype=dtype)
    engine = Engine(
        model, device=options.device, max_model_len=longest, enable_prefix_caching=False, max_num_seqs=64, **slots,
        **SERVED[name],
    )  # fmt: skip
    engine.warmup([32] * 8)
    requests = trace_requests(engine, options)
    before, accesses = engine.state(), record_experts(engine)
    begun = time.perf_counter()
    pending, running, done = list(requests), dict[int, tuple[Request, float]](), list[Row]()
    while pending or engine.busy:
        now = time.perf_counter() - begun
        while pending and pending[0]["arrival"] <= now:
            each = pending.pop(0)
            sampling = SamplingParams(max_tokens=each["output"], temperature=0, ignore_eos=True)
            request = engine.submit(each["prompt"], sampling)[0]
            running[id(request)] = (request, each["arrival"])
        for event in engine.step() if engine.busy else ():
            note(event, running, done, time.perf_counter() - begun)
        if not engine.busy and pending:
            time.sleep(max(pending[0]["arrival"] - (time.perf_counter() - begun), 0))
    seconds = time.perf_counter() - begun
    after = engine.state()
    counts = {key: after[key] - before[key] for key in after if key.startswith("expert") or key == "steps"}
    gaps = [gap for row in done for gap in row["gaps"]]
    result: Row = {
        "backend": engine.backend, "seconds_served": round(seconds, 2),
        "tokens_per_second": sum(len(row["gaps"]) + 1 for row in done) / seconds,
        "first_token_ms": quantiles([row["first"] for row in done]),
        "request_ms": quantiles([row["end"] for row in done]),
        "token_ms": quantiles(gaps), **counts,
    }  # fmt: skip
    if name == RESIDENT and accesses:
        flat = [expert for step in accesses for expert in step]
        result["accesses"] = len(flat)
        result["simulated"] = {
            str(slots): {policy: simulate(flat, slots, policy) / len(flat) for policy in EXPERT_POLICIES}
            for slots in range(1, len(DOMAINS))
        }
    return result


def note(event: Any, running: dict[int, tuple[Request, float]], done: list[Row], now: float) -> None:
    """Record when a token of a request arrived."""
    request, arrival = running[id(event.request)]
    times = request.__dict__.setdefault("times", [])
    if event.token is not None:
        times.append(now)
    if event.reason:
        gaps = [later - earlier for earlier, later in pairwise(times)]
        done.append({"first": times[0] - arrival, "end": times[-1] - arrival, "gaps": gaps})


def trace_requests(engine: Engine, options: argparse.Namespace) -> list[Row]:
    """Return prompts of all domains with the arrivals and lengths of the trace, scaled to `rate` per second."""
    with gzip.open(shared() / "data/serving_traces/azure_llm_2023_conv.csv.gz", "rt") as file:
        rows = [row for _, row in zip(range(options.requests), csv.DictReader(file), strict=False)]
    clock = [sum(float(part) * unit for part, unit in zip(row["TIMESTAMP"].split()[1].split(":"), (3600, 60, 1),
                                                          strict=True)) for row in rows]  # fmt: skip
    scale = (len(rows) / options.rate) / max(clock[-1] - clock[0], 1e-9)
    tokenizer: Any = engine.model.tokenizer
    texts = [
        tokenizer((options.folder / f"{name}-held-out.txt").read_text()[:400_000], add_special_tokens=False)[
            "input_ids"
        ]
        for name in DOMAINS
    ]
    rng, requests = random.Random(0), []
    for row, at in zip(rows, clock, strict=True):
        ids, length = rng.choice(texts), min(int(row["ContextTokens"]), options.max_prompt)
        start = rng.randrange(max(len(ids) - length, 1))
        output = min(max(int(row["GeneratedTokens"]), 2), options.max_output)
        requests.append(
            {"arrival": (at - clock[0]) * scale, "prompt": ids[start : start + length], "output": output}
        )  # fmt: skip
    return requests


def record_experts(engine: Engine) -> list[list[int]]:
    """Return a list to which the experts of every step are appended, in the order of their tokens."""
    accesses: list[list[int]] = []
    runner: Any = engine.runner
    if not hasattr(runner, "token_router"):
        return accesses
    plain = runner.launch

    def launch(batch: Any) -> Any:
        result = plain(batch)
        tokens = [
            expert
            for chunk in batch.chunks
            for expert in chunk.request.expert_routes[chunk.start : chunk.start + chunk.count]
        ]
        accesses.append(list(dict.fromkeys(tokens)))
        return result

    runner.launch = launch
    return accesses


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return the median, 95th and 99th percentile in milliseconds."""
    ordered = sorted(seconds)
    return {f"p{q}": round(1000 * ordered[min(math.ceil(q / 100 * len(ordered)), len(ordered)) - 1], 2)
            for q in (50, 95, 99)}  # fmt: skip


def text(rows: Sequence[Row], options: argparse.Namespace) -> str:
    quality = [row for row in rows if "perplexity" in row]
    lines = [f"# Experts carved out of {options.model}", "", caption(quality, options), ""]
    headings = ["row", *DOMAINS, "geometric mean", "of each seed", "parameters", "used per token in the blocks"]
    cells = []
    for name in QUALITY:
        same = [row for row in quality if row["row"] == name]
        if same:
            means = [geometric_mean(row["perplexity"].values()) for row in same]
            cells.append([
                name, *(f"{statistics.mean(row['perplexity'][d] for row in same):.2f}" for d in DOMAINS),
                f"{statistics.mean(means):.2f}", ", ".join(f"{value:.2f}" for value in means),
                f"{same[0]['parameters'] / 1e6:.4g} M", f"{same[0]['active_parameters'] / 1e6:.4g} M",
            ])  # fmt: skip
    lines += [table(headings, cells), ""]
    carved = [row for row in quality if row["row"] == CARVED]
    if carved:
        shared_part = statistics.mean(
            common / (common + own)
            for row in carved
            for common, own in zip(row["shared_channels"], row["expert_channels"], strict=True)
        )
        stability = statistics.mean(row["mask_stability"] for row in carved)
        lines += [
            f"Of the channels that a token uses, {100 * shared_part:.0f} % are shared by all experts; masks of two "
            f"halves of the texts have a Jaccard index of {stability:.2f}. "
            "Share of each domain's tokens that each expert gets (first seed):", "",
            table(["domain", *(f"expert {index}" for index in range(len(DOMAINS)))],
                  [[name, *(f"{100 * share:.0f} %" for share in shares)]
                   for name, shares in carved[0]["domain_shares"].items()]), "",
        ]  # fmt: skip
    return "\n".join([*lines, *served_lines([row for row in rows if "served" in row], options)])


def caption(quality: Sequence[Row], options: argparse.Namespace) -> str:
    tokens = int(options.epochs * options.samples * options.seq_len * len(DOMAINS) * (1 - VALIDATION))
    return (
        f"Perplexity on held-out text of five domains ({options.tokens:,} tokens each, context {options.seq_len}), "
        f"mean of {len({row['seed'] for row in quality})} seeds. A token uses half of every feed-forward. All rows but "
        f"the source train on the same {tokens:,} tokens."
    )


def served_lines(served: Sequence[Row], options: argparse.Namespace) -> list[str]:
    if not served:
        return []
    headings = ["served", "backend", "tokens/s", "request p50/p95/p99 ms", "first token p50/p95/p99 ms",
                "token p50/p95/p99 ms", "steps", "experts per step", "hit rate", "loaded MB"]  # fmt: skip
    cells = []
    for row in sorted(served, key=lambda row: list(SERVED).index(row["served"])):
        uses, hits, misses = (row.get(f"expert_{name}", 0) for name in ("uses", "hits", "misses"))
        cells.append([
            row["served"], row["backend"].split(",")[0], f"{row['tokens_per_second']:.0f}",
            *(" / ".join(f"{value:.4g}" for value in row[f"{name}_ms"].values())
              for name in ("request", "first_token", "token")),
            str(row["steps"]), f"{uses / row['steps']:.2f}" if uses else "",
            f"{100 * hits / (hits + misses):.1f} %" if hits + misses else "",
            f"{row['expert_bytes_loaded'] / 1e6:.0f}" if hits + misses else "",
        ])  # fmt: skip
    lines = [
        f"{options.requests} requests with arrivals and lengths of the trace, {options.rate:g} per second, prompts of "
        f"at most {options.max_prompt} and answers of at most {options.max_output} tokens; {options.slots} of "
        f"{len(DOMAINS)} experts on the device.", "", table(headings, cells), "",
    ]  # fmt: skip
    simulated = next((row["simulated"] for row in served if "simulated" in row), None)
    if simulated is not None:
        lines += [
            "Hit rates of the policies on the experts that the steps of the resident run used, one after another; "
            "Belady's policy sees the whole trace.", "",
            table(["slots", *EXPERT_POLICIES],
                  [[slots, *(f"{100 * rates[policy]:.1f} %" for policy in EXPERT_POLICIES)]
                   for slots, rates in simulated.items()]), "",
        ]  # fmt: skip
    return lines


def geometric_mean(values: Any) -> float:
    return math.exp(statistics.mean(math.log(value) for value in values))


if __name__ == "__main__":
    main()
