"""One layer's decode attention for small and large batches, in pages of head clusters: how heads are split.

    PYTHONPATH=src:benchmarks python benchmarks/serve/gpu_kv_splits.py [--prompt 32768] [--kv-types int8 fp8 int4]

Splits in proportion to budgets, as in the table of `serve/engine/per_head/parts.py`, against one number of splits for
all heads; pages of clusters that keep everything against plain ones, and plain ones quantized.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from common import copy_bandwidth, graph_seconds, table, write
from gpu_engine import COMMON

from smelt.kernels.gpu.arch import num_sms
from smelt.kernels.gpu.paged import DecodeMetadata, num_splits, paged_decode
from smelt.kernels.gpu.pages import ClusteredHeadPages
from smelt.kernels.gpu.rope import RotaryParams
from smelt.kernels.kv_quant import KV_QUANT_DTYPES, KVQuantFormat, row_layout
from smelt.kvcache.eviction.clusters import splits_per_cluster
from smelt.serve.engine.per_head.kv_splits import build_split_work, choose_num_splits

KV_HEADS, WIDTH = 8, 128
SKEWED = (1.0, 0.5, 0.25, 0.25, 0.1, 0.1, 0.05, 0.05)  # share of tokens that each head keeps
COLUMNS, SIZE = 4, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument(
        "--kv-types", nargs="+", choices=KV_QUANT_DTYPES, default=[], help="also measure these KV cache dtypes"
    )
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    rows = splitting(options.prompt, bandwidth, options.kv_types)
    write("serve_gpu_kv_splits", rows, _text(rows, bandwidth))


def splitting(length: int, bandwidth: float, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Measure one token of 4 and of 64 requests."""
    rows = []
    for requests in (4, 64):
        for heads, budgets in (("skewed", SKEWED), ("even", (1.0,) * KV_HEADS)):
            rows += [{"requests": requests, "heads": heads, **row} for row in _layer(length, requests, budgets)]
        rows += [
            {"requests": requests, "heads": "even", **_plain(length, requests, kv_dtype)} for kv_dtype in (None, *kinds)
        ]
    for row in rows:
        row["share_of_bandwidth"] = row["bytes"] / bandwidth / (row["us"] / 1e6)
        print(row, flush=True)
    return rows


def _layer(length: int, requests: int, budgets: tuple[float, ...]) -> list[dict[str, Any]]:
    heads, chip = COMMON["num_attention_heads"], num_sms(torch.device("cuda"))
    rotation = RotaryParams(*(torch.randn(length + 1, WIDTH, device="cuda") for _ in range(2)))
    kept = (torch.tensor(budgets) * length).long()
    blocks = int(kept.max()) // SIZE + 1
    tables = torch.randperm(requests * KV_HEADS * blocks, device="cuda").view(requests, KV_HEADS, blocks).int()
    keys, values = (
        torch.randn(tables.numel() * COLUMNS, SIZE, 1, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    shifts = (kept - length).int().cuda().expand(requests, -1).contiguous()
    every = torch.arange(KV_HEADS, device="cuda")
    qkv = torch.randn(requests, (heads + 2 * KV_HEADS) * WIDTH, device="cuda", dtype=torch.bfloat16)
    split_counter = torch.zeros(requests * KV_HEADS, dtype=torch.int32, device="cuda")
    lengths = torch.full((requests,), length, device="cuda")
    tokens = DecodeMetadata(torch.arange(requests, device="cuda"), lengths, tables, split_counter, length)
    shares = tuple(splits_per_cluster(torch.tensor(budgets)).tolist())
    alike = (num_splits(requests, KV_HEADS, length, chip),) * KV_HEADS
    layouts = {"as the table says": alike if len(set(shares)) == 1 else choose_num_splits(shares, requests, chip)}
    layouts |= {f"{count} for every head": (count,) * KV_HEADS for count in (1, 2, 4, 8, 16, 32)}
    rows = []
    for layout, parts in layouts.items():
        work = torch.tensor(build_split_work(shares, parts), dtype=torch.int32, device="cuda")
        own = ClusteredHeadPages(tables, shifts, every, every % COLUMNS, COLUMNS, work)
        most = 1 << (max(parts) - 1).bit_length()

        def call(own: ClusteredHeadPages = own, most: int = most) -> Any:
            return paged_decode(qkv, keys, values, tokens, rotation, 0.1, head_pages=own, splits=most)

        rows.append({"way": layout, "parts": parts, "us": graph_seconds([call] * 4) * 1e6})
    return [{"tokens": length, "bytes": 4 * WIDTH * int(kept.sum()) * requests, **row} for row in rows]


def _plain(length: int, requests: int, kind: str | None) -> dict[str, Any]:
    """Measure plain pages, in the network's dtype or quantized; bytes as stored."""
    form = None if kind is None else KVQuantFormat.for_head_dim(kind, WIDTH)
    last, dtype = row_layout(form, WIDTH, torch.bfloat16)
    blocks = length // SIZE + 1
    numbers = torch.randn(SIZE, KV_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    block = numbers if form is None else form.quantize(numbers)  # one for all: the contents do not affect the time
    pages = [block.expand(requests * blocks, -1, -1, -1).contiguous() for _ in range(2)]
    tables = torch.randperm(requests * blocks, device="cuda").view(requests, -1).int()
    split_counter = torch.zeros(requests * KV_HEADS, dtype=torch.int32, device="cuda")
    lengths = torch.full((requests,), length, device="cuda")
    tokens = DecodeMetadata(torch.arange(requests, device="cuda"), lengths, tables, split_counter, length)
    heads = COMMON["num_attention_heads"]
    qkv = torch.randn(requests, (heads + 2 * KV_HEADS) * WIDTH, device="cuda", dtype=torch.bfloat16)
    rotation = RotaryParams(*(torch.randn(length + 1, WIDTH, device="cuda") for _ in range(2)))
    seconds = graph_seconds([lambda: paged_decode(qkv, *pages, tokens, rotation, 0.1, kv_quant=form)] * 4)
    octets = 2 * last * dtype.itemsize * KV_HEADS * length * requests
    name = "plain pages" if kind is None else f"plain pages, {kind}"
    return {"tokens": length, "bytes": octets, "way": name, "parts": [], "us": seconds * 1e6}


def _text(rows: list[dict[str, Any]], bandwidth: float) -> str:
    lines = [
        [str(row["requests"]), f"{row['tokens']:,}", row["heads"], row["way"], f"{row['us']:.0f}",
         f"{row['share_of_bandwidth']:.0%}"]
        for row in rows
    ]  # fmt: skip
    return (
        "# One layer's decode attention, by KV splits\n\n"
        f"Llama 8B shape, one token of every request; skewed heads keep {', '.join(f'{share:g}' for share in SKEWED)} "
        f"of the tokens, even ones all. Inside a CUDA graph; copy bandwidth {bandwidth / 1e12:.2f} TB/s.\n\n"
        + table(["requests", "tokens", "heads", "splits per head", "us", "of the copy bandwidth"], lines)
        + "\n"
    )


if __name__ == "__main__":
    main()
