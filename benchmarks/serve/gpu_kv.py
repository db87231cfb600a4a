"""A compressed cache on one GPU: Llama 8B shape with random weights, long prompts, against our own plain pages.

    PYTHONPATH=src:benchmarks python benchmarks/serve/gpu_kv.py [--prompt 32768] [--requests 64] [--cache-gb 64]
        [--kv-types int8 fp8 int4]

Each engine gets the same memory for keys and values and the same requests, all at once. The profile is made up: a
tenth of the heads keeps nearly everything, the others little, 25 % in all; random weights would keep alike in all
heads. How much a head keeps decides about time and memory, which tokens these are does not: the weights need not mean
anything.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from typing import Any

import torch
from common import copy_bandwidth, graph_seconds, table, write
from gpu_engine import COMMON, SEED, random_network
from long_prompts import answered, headings_of_runs, row_of_run

from smelt.kernels.gpu.chip import processors
from smelt.kernels.gpu.paged import Tokens, paged_decode, splits_for
from smelt.kernels.gpu.pages import HeadPages
from smelt.kernels.gpu.rotation import Rotation
from smelt.kernels.row_format import NAMES, RowFormat, stored
from smelt.kv.budget import check_keep
from smelt.kv.profile import Profile, Shape
from smelt.kv.splits import splits
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.kinds import told
from smelt.serve.engine.ragged.parts import parts_of, work_of

LAYERS, KV_HEADS, WIDTH = 32, 8, 128


def main() -> None:
    options = _options()
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    network = random_network("8b")
    network.config.max_position_embeddings = options.prompt + max(options.answers) + 8
    engines: dict[str, dict[str, Any]] = {
        "head clusters, keep 25 %": {"kv": profile(0.25)},
        "plain pages": {},
        "head clusters, keep 100 %": {"kv": profile(1.0)},
    }
    for kind in options.kv_types:
        engines[f"plain pages, {kind}"] = {"kv_type": kind}
        engines[f"head clusters, keep 25 %, {kind}"] = {"kv": profile(0.25), "kv_type": kind}
    few = max(2, options.requests // 16)
    for name in engines if options.engines is None else options.engines:
        engine = _engine(network, options, engines[name])
        assert engine.runner.path == _path(engines[name]), engine.runner.path
        for count, length in ((options.requests, 512), (few, 2 * options.chunk)):  # compiles and captures
            answered(engine, prompts(count, min(options.prompt, length)), 80)
        rows.append(
            {"engine": name, "measure": "a few", **answered(engine, prompts(few, options.prompt), options.short)}
        )
        print(rows[-1], flush=True)
        if name != "head clusters, keep 100 %":
            for answer in options.answers:
                made = answered(engine, prompts(options.requests, options.prompt), answer)
                rows.append({"engine": name, "measure": "all", **made})
                print(rows[-1], flush=True)
        write("serve_gpu_kv", rows, _text(rows, options, bandwidth))
        del engine
        _freed()
    del network
    _freed()
    if "splitting" not in options.without:
        rows += splitting(options.prompt, bandwidth, options.kv_types)
    write("serve_gpu_kv", rows, _text(rows, options, bandwidth))


def _path(settings: dict[str, Any]) -> str:
    """What is to compute the steps of such an engine."""
    pages = ", pages of head clusters" if "kv" in settings else ""
    return f"gpu-program{pages}{told(settings.get('kv_type'))} with graphs"


def _freed() -> None:
    gc.collect()  # an engine and its parts know one another
    torch.cuda.empty_cache()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--answers", type=int, nargs="+", default=[1024], help="tokens of the answers; a run for each")
    parser.add_argument("--short", type=int, default=128, help="tokens of the answers where a few requests are run")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--cache-gb", type=float, default=64.0)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--engines", nargs="*", help="only these")
    parser.add_argument("--kv-types", nargs="+", choices=NAMES, default=[], help="keys and values also in these")
    parser.add_argument("--without", nargs="+", choices=["splitting"], default=[])
    return parser.parse_args()


def profile(keep: float) -> Profile:
    """Skewed, the same at every call."""
    check_keep(keep)
    generator = torch.Generator().manual_seed(SEED)
    shares = torch.rand(LAYERS, KV_HEADS, generator=generator).double()
    many = torch.rand(LAYERS, KV_HEADS, generator=generator) < 0.1
    means = torch.where(many, 0.85 + 0.1 * shares, 0.02 + 0.3 * shares)
    nothing = tuple(tuple(0.0 for _ in range(KV_HEADS)) for _ in range(LAYERS))
    budgets = torch.ones_like(means) if keep == 1 else means
    return Profile(
        Shape("llama", LAYERS, KV_HEADS, WIDTH), "snapkv", keep, 1, tuple(map(tuple, budgets.tolist())), nothing
    )


def _engine(network: Any, options: argparse.Namespace, more: dict[str, Any]) -> Engine:
    return Engine(
        Model(network), context=options.prompt + max(options.answers) + 8, batch_requests=max(options.requests, 96),
        batch_tokens=options.chunk, cache_bytes=int(options.cache_gb * 1e9), prefix_cache=False, **more,
    )  # fmt: skip


def prompts(count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(10, COMMON["vocab_size"], (count, length), generator=generator).tolist()


SKEWED = (1.0, 0.5, 0.25, 0.25, 0.1, 0.1, 0.05, 0.05)  # of what heads keep
COLUMNS, SIZE = 4, 16


def splitting(length: int, bandwidth: float, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """One layer's attention for one token of 4 and of 64 requests: parts in proportion to budgets against one number of
    parts for all heads; pages of clusters that keep everything against plain ones; and plain ones of these kinds."""
    rows = []
    for requests in (4, 64):
        for heads, budgets in (("skewed", SKEWED), ("even", (1.0,) * KV_HEADS)):
            rows += [
                {"measure": "splits", "requests": requests, "heads": heads, **row}
                for row in _layer(length, requests, budgets)
            ]
        rows += [
            {"measure": "splits", "requests": requests, "heads": "even", **_plain(length, requests, kind)}
            for kind in (None, *kinds)
        ]
    for row in rows:
        row["share_of_bandwidth"] = row["bytes"] / bandwidth / (row["us"] / 1e6)
        print(row, flush=True)
    return rows


def _layer(length: int, requests: int, budgets: tuple[float, ...]) -> list[dict[str, Any]]:
    heads, chip = COMMON["num_attention_heads"], processors(torch.device("cuda"))
    rotation = Rotation(*(torch.randn(length + 1, WIDTH, device="cuda") for _ in range(2)))
    kept = (torch.tensor(budgets) * length).long()
    blocks = int(kept.max()) // SIZE + 1
    tables = torch.randperm(requests * KV_HEADS * blocks, device="cuda").view(requests, KV_HEADS, blocks).int()
    keys, values = (
        torch.randn(tables.numel() * COLUMNS, SIZE, 1, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    shifts = (kept - length).int().cuda().expand(requests, -1).contiguous()
    every = torch.arange(KV_HEADS, device="cuda")
    mixed = torch.randn(requests, (heads + 2 * KV_HEADS) * WIDTH, device="cuda", dtype=torch.bfloat16)
    arrived = torch.zeros(requests * KV_HEADS, dtype=torch.int32, device="cuda")
    lengths = torch.full((requests,), length, device="cuda")
    tokens = Tokens(torch.arange(requests, device="cuda"), lengths, tables, arrived, length)
    shares = tuple(splits(torch.tensor(budgets)).tolist())
    alike = (splits_for(requests, KV_HEADS, length, chip),) * KV_HEADS
    ways = {"as the table says": alike if len(set(shares)) == 1 else parts_of(shares, requests, chip)}
    ways |= {f"{count} for every head": (count,) * KV_HEADS for count in (1, 2, 4, 8, 16, 32)}
    rows = []
    for way, parts in ways.items():
        work = torch.tensor(work_of(shares, parts), dtype=torch.int32, device="cuda")
        own = HeadPages(tables, shifts, every, every % COLUMNS, COLUMNS, work)
        most = 1 << (max(parts) - 1).bit_length()

        def call(own: HeadPages = own, most: int = most) -> Any:
            return paged_decode(mixed, keys, values, tokens, rotation, 0.1, pages=own, splits=most)

        rows.append({"way": way, "parts": parts, "us": graph_seconds([call] * 4) * 1e6})
    return [{"tokens": length, "bytes": 4 * WIDTH * int(kept.sum()) * requests, **row} for row in rows]


def _plain(length: int, requests: int, kind: str | None) -> dict[str, Any]:
    """The same with plain pages, in the network's own numbers or in rows of few bits; bytes as they are stored."""
    form = None if kind is None else RowFormat.of(kind, WIDTH)
    last, dtype = stored(form, WIDTH, torch.bfloat16)
    blocks = length // SIZE + 1
    numbers = torch.randn(SIZE, KV_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    block = numbers if form is None else form.encode(numbers)  # one for all: what is in them does not decide about time
    pages = [block.expand(requests * blocks, -1, -1, -1).contiguous() for _ in range(2)]
    tables = torch.randperm(requests * blocks, device="cuda").view(requests, -1).int()
    arrived = torch.zeros(requests * KV_HEADS, dtype=torch.int32, device="cuda")
    lengths = torch.full((requests,), length, device="cuda")
    tokens = Tokens(torch.arange(requests, device="cuda"), lengths, tables, arrived, length)
    heads = COMMON["num_attention_heads"]
    mixed = torch.randn(requests, (heads + 2 * KV_HEADS) * WIDTH, device="cuda", dtype=torch.bfloat16)
    rotation = Rotation(*(torch.randn(length + 1, WIDTH, device="cuda") for _ in range(2)))
    seconds = graph_seconds([lambda: paged_decode(mixed, *pages, tokens, rotation, 0.1, rows=form)] * 4)
    octets = 2 * last * dtype.itemsize * KV_HEADS * length * requests
    way = "plain pages" if kind is None else f"plain pages, {kind}"
    return {"tokens": length, "bytes": octets, "way": way, "parts": [], "us": seconds * 1e6}


def _text(rows: list[dict[str, Any]], options: argparse.Namespace, bandwidth: float) -> str:
    runs = [row for row in rows if row["measure"] != "splits"]
    cells = [row_of_run(row) for row in runs]
    text = (
        "# A compressed cache on one GPU\n\n"
        f"Llama 8B shape, random bfloat16 weights, prompts of {options.prompt:,} tokens, {options.cache_gb:g} GB for "
        f"keys and values, chunks of {options.chunk:,}; copy bandwidth {bandwidth / 1e12:.2f} TB/s. One run.\n\n"
        + table(headings_of_runs(), cells)
    )
    split = [row for row in rows if row["measure"] == "splits"]
    if split:
        lines = [
            [str(row["requests"]), f"{row['tokens']:,}", row["heads"], row["way"], f"{row['us']:.0f}",
             f"{row['share_of_bandwidth']:.0%}"]
            for row in split
        ]  # fmt: skip
        text += (
            "\n\n## One layer's attention to a token\n\nSkewed heads keep 100 to 5 % of the tokens, even ones all.\n\n"
            + table(["requests", "tokens", "heads", "parts of a head's keys", "us", "of the copy bandwidth"], lines)
        )
    return text + "\n"


if __name__ == "__main__":
    main()
