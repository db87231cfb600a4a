"""Attention over pages on one GPU: prompts and decode, with every dtype of the KV cache.

    PYTHONPATH=src:benchmarks python benchmarks/serve/gpu_attention.py [--prompts 1] [--decodes 2] [--name NAME]

The heads of Llama 8B (32 query heads, 8 KV heads, head_dim 128), bf16, random values, pages of 16 tokens in random
order. Times are of calls inside a CUDA graph, of one layer. On Hopper GPUs the engine takes the CUDA kernels where they
are listed; Triton's, and PyTorch's on K and V without pages, are beside them. Decode includes RoPE and the storing of
the new token. Prompts with a quantized KV cache include dequantizing it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import copy_bandwidth, graph_seconds, table, write
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.gpu import hopper_attention
from smelt.kernels.gpu.paged import DecodeMetadata, QueryTiles, paged_decode, paged_prefill, prefill_config
from smelt.kernels.gpu.prefill import PageList, PrefillAttention
from smelt.kernels.gpu.rope import RotaryParams, rope_and_store_kv
from smelt.kernels.kv_quant import KV_QUANT_DTYPES, KVQuantFormat

SEED, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 0, 32, 8, 128, 16
ROTATED = 500 * 2**20  # bytes of pages used in turn when decoding
PROMPTS = [(1, 16384, 16384), (1, 8192, 8192), (8, 4096, 4096), (32, 256, 256), (1, 2048, 16384), (1, 1024, 1024)]
DECODES = [(64, 8000), (32, 8000), (16, 8000), (256, 384), (128, 384), (64, 384), (32, 384), (16, 384)]
MAX_MODEL_LEN = 16384
SCALE = HEAD_DIM**-0.5
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="only so many of the prompts")
    parser.add_argument("--decodes", type=int, default=len(DECODES), help="only so many of the decodes")
    parser.add_argument("--name", default="serve_gpu_attention", help="name of the results")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    bandwidth = copy_bandwidth()
    rows: list[Row] = []
    for prompt in PROMPTS[: options.prompts]:
        rows += measure_prompts(*prompt)
    for decode in DECODES[: options.decodes]:
        rows += measure_decode(*decode, bandwidth)
    write(options.name, rows, text(rows, bandwidth))


def random_pages(blocks: int, kv_quant: KVQuantFormat | None) -> Tensor:
    pages = torch.randn(blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    return pages if kv_quant is None else torch.cat([kv_quant.quantize(part) for part in pages.split(1 << 14)])


def measure_prompts(requests: int, new: int, length: int) -> list[Row]:
    """Measure prompts of `length` tokens, of which the last `new` are computed."""
    blocks = requests * length // BLOCK_SIZE
    tables = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(requests, -1)
    metadata = AttentionMetadata(
        torch.arange(0, requests * new + 1, new, device="cuda", dtype=torch.int32),
        torch.full((requests,), length, device="cuda", dtype=torch.int32), tables,
        torch.zeros(requests * new, device="cuda", dtype=torch.int64), length, [new] * requests,
    )  # fmt: skip
    queries = torch.randn(requests * new, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    repeats = 2 if length >= 4096 else 8
    rows = []
    for name in (None, *KV_QUANT_DTYPES):
        kv_quant = None if name is None else KVQuantFormat.for_head_dim(name, HEAD_DIM)
        keys, values = random_pages(blocks, kv_quant), random_pages(blocks, kv_quant)
        tiles = QueryTiles.from_query_lens(
            metadata.query_lens, queries.device, prefill_config(metadata, HEAD_DIM, kv_quant)
        )
        copied = torch.arange(blocks, device="cuda", dtype=torch.int32).view(requests, -1)
        attention = PrefillAttention(
            metadata, tiles, lambda tokens: requests * -(-new // tokens),
            hopper_attention.LONG if length >= 2048 else hopper_attention.SHORT, PageList(tables.flatten(), copied),
        )  # fmt: skip
        calls = {
            "engine": lambda a=attention, k=keys, v=values, q=kv_quant: a(queries, k, v, SCALE, None, q),
            "Triton": lambda t=tiles, k=keys, v=values, q=kv_quant: paged_prefill(
                queries, k, v, metadata, SCALE, tiles=t, kv_quant=q
            ),
        }
        if kv_quant is None and new == length:
            calls["PyTorch (cuDNN), no pages"] = lambda k=keys, v=values: dense_attention(queries, k, v, requests)
        for kernel, call in calls.items():
            seconds = graph_seconds([call] * repeats, 10)
            flops = 4 * requests * HEADS * HEAD_DIM * (new * (length - new) + new * new / 2)
            rows.append({
                "work": "prompts", "requests": requests, "new": new, "length": length, "kv_dtype": name or "bf16",
                "kernel": kernel, "microseconds": 1e6 * seconds, "teraflops": flops / seconds / 1e12,
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def dense_attention(queries: Tensor, keys: Tensor, values: Tensor, requests: int) -> Tensor:
    q, k, v = (x.reshape(requests, -1, x.shape[-2], HEAD_DIM).transpose(1, 2) for x in (queries, keys, values))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def measure_decode(requests: int, length: int, bandwidth: float) -> list[Row]:
    per_request = -(-length // BLOCK_SIZE)
    blocks = requests * per_request
    tables = torch.randperm(blocks, device="cuda", dtype=torch.int32).view(requests, -1)
    slots, seq_lens = torch.arange(requests, device="cuda"), torch.full((requests,), length, device="cuda")
    counters = torch.zeros(requests * KV_HEADS, device="cuda", dtype=torch.int32)
    metadata = DecodeMetadata(slots, seq_lens, tables, counters, MAX_MODEL_LEN)
    angles = torch.randn(length + 1, HEAD_DIM, device="cuda")
    rotary = RotaryParams(angles.cos(), angles.sin())
    qkv = torch.randn(requests, (HEADS + 2 * KV_HEADS) * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    positions = seq_lens - 1
    slot_mapping = tables[slots, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    rows = []
    for name in (None, *KV_QUANT_DTYPES):
        kv_quant = None if name is None else KVQuantFormat.for_head_dim(name, HEAD_DIM)
        one = random_pages(blocks, kv_quant)
        pages = [(one.clone(), one.clone()) for _ in range(max(1, ROTATED // (2 * one.nbytes)))]
        row_bytes = 2 * HEAD_DIM if kv_quant is None else kv_quant.row_bytes

        def on_hopper(keys: Tensor, values: Tensor, kv_quant: KVQuantFormat | None = kv_quant) -> Tensor:
            assert kv_quant is not None
            queries = rope_and_store_kv(qkv, positions, slot_mapping, rotary, keys, values, kv_quant=kv_quant)
            return hopper_attention.decode(queries, keys, values, kv_quant, metadata, SCALE)

        def in_triton(keys: Tensor, values: Tensor, kv_quant: KVQuantFormat | None = kv_quant) -> Tensor:
            return paged_decode(qkv, keys, values, metadata, rotary, SCALE, kv_quant=kv_quant)

        calls = {"Triton": in_triton}
        if hopper_attention.supports_decode(kv_quant, qkv, HEADS, KV_HEADS, BLOCK_SIZE, MAX_MODEL_LEN):
            calls = {"engine": on_hopper, **calls}
        for kernel, call in calls.items():
            repeats = max(1, 4 // len(pages))
            seconds = graph_seconds([lambda p=pair, c=call: c(*p) for pair in pages] * repeats, 10)
            rows.append({
                "work": "decode", "requests": requests, "new": 1, "length": length, "kv_dtype": name or "bf16",
                "kernel": kernel if len(calls) > 1 else "engine (Triton)", "microseconds": 1e6 * seconds,
                "share_of_copy": 2 * requests * length * KV_HEADS * row_bytes / seconds / bandwidth,
            })  # fmt: skip
            print(rows[-1], flush=True)
        del pages, one
    return rows


def text(rows: list[Row], bandwidth: float) -> str:
    base = {
        (row["requests"], row["new"], row["length"]): row["microseconds"]
        for row in rows
        if row["kv_dtype"] == "bf16" and row["kernel"].startswith("engine")
    }
    cells = [
        [
            f"{row['work']}, {row['requests']} x {row['length']:,}"
            + (f", the last {row['new']:,}" if 1 < row["new"] < row["length"] else ""),
            row["kv_dtype"], row["kernel"], f"{row['microseconds']:.1f}",
            f"{row['microseconds'] / base[row['requests'], row['new'], row['length']]:.2f}",
            f"{row['teraflops']:.0f}" if "teraflops" in row else "",
            f"{row['share_of_copy']:.0%}" if "share_of_copy" in row else "",
        ]
        for row in rows
    ]  # fmt: skip
    headings = ["work", "KV cache", "kernel", "time, us", "of bf16", "TFLOP/s", "of copy bandwidth"]
    return (
        f"# Attention over pages on one GPU\n\nLlama 8B heads, one layer, seed {SEED}, random values; a copy "
        f"reaches {bandwidth / 1e12:.2f} TB/s, read and written. `of bf16`: the time over the engine's with a "
        "bf16 KV cache.\n\n" + table(headings, cells)
    )


if __name__ == "__main__":
    main()
