"""The kernels of the engine on one GPU, each against the bandwidth of a large copy, or against PyTorch's own.

    PYTHONPATH=src:benchmarks python benchmarks/serve/gpu_engine_kernels.py [--tune]

Shapes of Llama 1B and 8B, bf16, random values. Times are of calls inside a CUDA graph; matrices and pages exceed the L2
cache and are used in turn. `--tune` measures other tile sizes beside the configured ones.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import copy_bandwidth, graph_seconds, table, write
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.gpu import paged, vector
from smelt.kernels.gpu.arch import num_sms
from smelt.kernels.gpu.rope import RotaryParams

SEED, SIZE = 0, 16
ROTATED = 400 * 2**20  # bytes of matrices or pages used in turn
WIDTHS = {"1b": (2048, 8192, 64), "8b": (4096, 14336, 128)}  # hidden size, FFN size, head_dim
VOCABULARY, HEADS, KV_HEADS = 128256, 32, 8
LENGTH = 384  # tokens of a request, halfway through its answer

VECTOR_TILES = [(1, 1024, 4), (1, 2048, 4), (2, 512, 4), (2, 1024, 4), (2, 2048, 8), (4, 512, 4), (4, 1024, 4),
                (4, 1024, 8), (4, 2048, 8), (8, 512, 4), (8, 512, 8), (8, 1024, 8), (16, 256, 4)]  # fmt: skip
DECODE_TILES = [(32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 2, 3), (128, 4, 2), (128, 8, 2),
                (128, 4, 3)]  # fmt: skip
PREFILL_TILES = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4),
                 (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 32, 4, 3), (128, 32, 8, 3)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="also measure other tiles")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), help="only these")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    for shape in WIDTHS:
        for work in options.works:
            rows += WORKS[work](shape, bandwidth, options.tune)
            write("serve_gpu_kernels", rows, _text(rows, bandwidth))


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def vectors(shape: str, bandwidth: float, tune: bool) -> list[dict[str, Any]]:
    """Measure matrix-vector products: ours with their fused operations, PyTorch's without."""
    hidden, inner, head = WIDTHS[shape]
    kinds = {
        "queries, keys, values": ((HEADS + 2 * KV_HEADS) * head, hidden, "norm"),
        "output of attention": (hidden, HEADS * head, "add"),
        "gate and up": (2 * inner, hidden, "gate"),
        "down": (hidden, inner, "add"),
        "head": (VOCABULARY, hidden, "norm"),
    }
    rows = []
    for name, (height, width, kind) in kinds.items():
        matrices = [_random(height, width) for _ in range(max(2, ROTATED // (2 * height * width)))]
        x, norm, y = _random(1, width), torch.ones(width, device="cuda", dtype=torch.bfloat16), _random(1, height)

        def ours(matrix: Tensor, tiles: Any = None, kind: str = kind, given: Any = (x, norm, y)) -> Tensor:
            x, norm, y = given
            around = {"norm": norm, "epsilon": 1e-5} if kind != "add" else {"added": y}
            return vector.fused_gemv(x, matrix, gated=kind == "gate", tiles=tiles, **around)

        _check(ours(matrices[0].clone()), x, norm, matrices[0], kind, y)
        count = height // (2 if kind == "gate" else 1)
        chosen = vector.gemv_config(count, kind != "add", kind == "gate")
        for tiles in [chosen, *(other for other in VECTOR_TILES if tune and other != chosen)]:
            time = graph_seconds([lambda m=matrix, t=tiles: ours(m, t) for matrix in matrices])
            rows.append(_row(shape, name, f"vector {tiles}", tiles == chosen, time, 2 * height * width / bandwidth))
        time = graph_seconds([lambda m=matrix, x=x: F.linear(x, m) for matrix in matrices])
        rows.append(_row(shape, name, "PyTorch, the product alone", False, time, 2 * height * width / bandwidth))
        del matrices
    return rows


def _check(actual: Tensor, x: Tensor, norm: Tensor, matrix: Tensor, kind: str, y: Tensor) -> None:
    if kind == "add":
        return  # works in place and was already called: covered by the tests
    wide = x.double()
    wide = wide * torch.rsqrt(wide.square().mean() + 1e-5) * norm.double()
    expected = wide @ matrix.double().T
    if kind == "gate":
        gates, through = expected.chunk(2, dim=-1)
        expected = F.silu(gates) * through
    assert float((actual.double() - expected).norm() / expected.norm()) < 5e-3


def _pages(shape: str, requests: int) -> tuple[list[list[Tensor]], Tensor]:
    blocks = requests * -(-LENGTH // SIZE)
    width = WIDTHS[shape][2]
    copy_bytes = 2 * 2 * blocks * SIZE * KV_HEADS * width
    pages = [
        [_random(blocks, SIZE, KV_HEADS, width) for _ in range(2)]
        for _ in range(max(1, min(16, ROTATED // copy_bytes)))
    ]
    return pages, torch.randperm(blocks, device="cuda").view(requests, -1).int()


def decoding(shape: str, bandwidth: float, tune: bool) -> list[dict[str, Any]]:
    return [row for count in (1, 64, 256 if shape == "1b" else 128) for row in _decoding(shape, count, bandwidth, tune)]


def _decoding(shape: str, requests: int, bandwidth: float, tune: bool) -> list[dict[str, Any]]:
    width = WIDTHS[shape][2]
    rotation = RotaryParams(torch.randn(LENGTH, width, device="cuda"), torch.randn(LENGTH, width, device="cuda"))
    pages, tables = _pages(shape, requests)
    lengths = torch.full((requests,), LENGTH, device="cuda")
    split_counter = torch.zeros(requests * KV_HEADS, dtype=torch.int32, device="cuda")
    tokens = paged.DecodeMetadata(torch.arange(requests, device="cuda"), lengths, tables, split_counter, 1024)
    qkv = _random(requests, (HEADS + 2 * KV_HEADS) * width)
    chip = num_sms(qkv.device)
    num_splits = paged.num_splits(requests, KV_HEADS, tokens.max_seq_len, chip)
    configs = [
        (paged.decode_config(requests * KV_HEADS * num_splits, num_splits, tokens.max_seq_len, chip), num_splits)
    ]
    if tune:
        configs += [(tiles, num_splits) for tiles in DECODE_TILES if tiles != configs[0][0]]
        configs += [
            (configs[0][0], parts) for parts in {max(1, num_splits // 2), num_splits * 2} if parts != num_splits
        ]
    rows = []
    for tiles, parts in configs:
        calls = [
            lambda p=page, t=tiles, s=parts: paged.paged_decode(qkv, *p, tokens, rotation, 0.1, splits=s, config=t)
            for page in pages
        ]
        time = graph_seconds(calls * (1 if len(calls) > 4 else 8))
        name, least = f"tiles {tiles}, {parts} parts", 4 * requests * LENGTH * KV_HEADS * width / bandwidth
        rows.append(_row(shape, f"decoding, {requests} requests", name, (tiles, parts) == configs[0], time, least))
    return rows


def prefilling(shape: str, bandwidth: float, tune: bool) -> list[dict[str, Any]]:
    """Measure 32 prompts of 256 tokens, and a chunk of 4,096 at the end of a long one, against PyTorch's unpaged
    attention.
    """
    short = _prefilling(shape, "prompts, 32 of 256", 32, 256, 256, tune)
    return short + _prefilling(shape, "the last 4,096 of 20,480 tokens", 1, 4096, 20480, tune)


def _prefilling(shape: str, work: str, count: int, new: int, length: int, tune: bool) -> list[dict[str, Any]]:
    """Measure `new` tokens for each request, at the end of `length`."""
    rows, width = [], WIDTHS[shape][2]
    blocks = -(-length // SIZE)
    tables = torch.randperm(count * blocks, device="cuda").view(count, -1).int()
    pages = [_random(count * blocks, SIZE, KV_HEADS, width) for _ in range(2)]
    starts = torch.arange(0, count * new + 1, new, device="cuda", dtype=torch.int32)
    lengths = torch.full((count,), length, device="cuda", dtype=torch.int32)
    batch = AttentionMetadata(starts, lengths, tables, starts.long(), length, [new] * count)
    queries = _random(count * new, HEADS, width)
    chosen = paged.prefill_config(batch, width)
    for tiles in PREFILL_TILES if tune else [chosen]:
        cut = paged.QueryTiles.from_query_lens(batch.query_lens, queries.device, tiles)
        time = graph_seconds([lambda c=cut: paged.paged_prefill(queries, *pages, batch, 0.1, tiles=c)] * 4)
        rows.append(_row(shape, work, f"tiles {tiles}", tiles == chosen, time, None))
    dense = [
        _random(count, heads, tokens, width) for heads, tokens in ((HEADS, new), (KV_HEADS, length), (KV_HEADS, length))
    ]
    mask = causal_lower_right(new, length)
    time = graph_seconds([lambda: F.scaled_dot_product_attention(*dense, attn_mask=mask, enable_gqa=True)] * 4)
    rows.append(_row(shape, work, "PyTorch, without pages", False, time, None))
    return rows


def _row(shape: str, work: str, way: str, taken: bool, time: float, least: float | None) -> dict[str, Any]:
    row = {"shape": shape, "work": work, "way": way, "taken": taken, "us": time * 1e6}
    if least is not None:
        row["of_bandwidth"] = least / time
    print(row, flush=True)
    return row


def _text(rows: list[dict[str, Any]], bandwidth: float) -> str:
    cells = [
        [
            row["shape"], row["work"], row["way"] + (" (taken)" if row["taken"] else ""), f"{row['us']:.1f}",
            f"{row['of_bandwidth']:.0%}" if "of_bandwidth" in row else "",
        ]
        for row in rows
    ]  # fmt: skip
    return (
        "# The engine's kernels on one GPU\n\n"
        f"Copy bandwidth {bandwidth / 1e12:.2f} TB/s, read and written; the bytes of weights, or of the KV cache, "
        f"over the time. Requests have {LENGTH} tokens. Matrix-vector products include the fused norm, gate or "
        "sum.\n\n" + table(["shape", "operation", "configuration", "time, us", "of copy bandwidth"], cells)
    )


WORKS = {"vectors": vectors, "decoding": decoding, "prefilling": prefilling}

if __name__ == "__main__":
    main()
