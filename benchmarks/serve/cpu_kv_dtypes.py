"""Quantized KV cache on CPU: capacity, speed, and perplexity.

    PYTHONPATH=benchmarks python benchmarks/serve/cpu_kv_dtypes.py [--prompt 2000] [--requests 8] [--texts 24]

SmolLM2-135M in its own 4-bit format, which computes in float32. Perplexity is over chunks of the default evaluation
text, every token use_attention to the KV cache as stored in pages. Then each engine gets the same memory and the same
requests, all at once: plain pages in each dtype, and head clusters that keep a quarter, in the network's dtype and in
int8. Nothing else should run.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from common import table, write
from cpu_kv import MODEL, SEED, default_tokens, make_profile
from long_prompts import run_headings, run_requests, run_row

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.kv_quant import INT8, KV_QUANT_DTYPES
from smelt.kvcache.eviction.profiling import sample_prompts
from smelt.models.load import load
from smelt.models.model import Model
from smelt.serve.engine.attention import ATTN_IMPLEMENTATION, PagedCache, block_bytes, paged_attention_fn, use_attention
from smelt.serve.engine.engine import Engine

LENGTH, BLOCK, KEEP = 1024, 16, 0.25
KV_CACHE_DTYPES = (None, *KV_QUANT_DTYPES)


def main() -> None:
    options = _options()
    model = load(MODEL)
    tokens = default_tokens(model)
    profile = make_profile(model, tokens["calibration"], KEEP)
    rows: list[dict[str, Any]] = []
    texts = sample_prompts(tokens["evaluation"] * 4, options.texts, LENGTH, SEED)
    for kv_dtype in KV_CACHE_DTYPES:
        rows.append(
            {"measure": "perplexity", "type": kv_dtype or "model", "perplexity": perplexity(model, texts, kv_dtype)}
        )
        rows[-1]["bytes"] = block_bytes(model.anatomy, 1, model.network.dtype, kv_dtype)
        print(rows[-1], flush=True)
    long = sample_prompts(tokens["evaluation"] * 4, options.requests, options.prompt, SEED)
    for kv, kv_dtype in (*((None, kv_dtype) for kv_dtype in KV_CACHE_DTYPES), (profile, None), (profile, INT8)):
        name = f"{'plain pages' if kv is None else f'head clusters, keep {KEEP:.0%}'}, {kv_dtype or 'model'}"
        engine = Engine(
            MODEL,
            max_model_len=4096,
            max_num_seqs=options.requests,
            max_num_batched_tokens=1024,
            kv_profile=kv,
            kv_cache_dtype=kv_dtype,
            kv_cache_bytes=int(options.cache_gb * 1e9),
        )
        assert engine.runner.backend.startswith("compiled-cpu"), engine.runner.backend
        rows.append({"measure": "run", "engine": name, **run_requests(engine, long, options.answer)})
        print(rows[-1], flush=True)
        write("serve_cpu_kv_dtypes", rows, _text(rows, options))


@torch.inference_mode()
def perplexity(model: Model, texts: list[list[int]], kind: str | None) -> float:
    """Return the perplexity; a text is one chunk, whose KV cache is written to pages and read from there."""
    blocks = LENGTH // BLOCK
    cache = PagedCache.empty(model.anatomy, blocks, BLOCK, model.network.dtype, model.device, kind)
    model.network.set_attn_implementation(ATTN_IMPLEMENTATION)
    slots = torch.arange(LENGTH)
    pages = AttentionMetadata(
        torch.tensor([0, LENGTH], dtype=torch.int32), torch.tensor([LENGTH], dtype=torch.int32),
        torch.arange(blocks, dtype=torch.int32)[None], slots, LENGTH, [LENGTH],
    )  # fmt: skip
    total = 0.0
    for text in texts:
        ids = torch.tensor(text)
        with use_attention(paged_attention_fn(cache, pages)):
            logits = model.network(input_ids=ids[None], position_ids=slots[None], use_cache=False).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits[:-1].float(), ids[1:]))
    return math.exp(total / len(texts))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--cache-gb", type=float, default=0.25)
    return parser.parse_args()


def _text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    quality = [row for row in rows if row["measure"] == "perplexity"]
    runs = [run_row(row) for row in rows if row["measure"] == "run"]
    baseline = quality[0]
    cells = [
        [
            row["type"],
            f"{row['bytes']:,}",
            f"{row['perplexity']:.3f}",
            f"{row['perplexity'] / baseline['perplexity'] - 1:+.2%}",
        ]
        for row in quality
    ]
    return (
        f"# Quantized KV cache on CPU\n\n{MODEL}, {options.texts} texts of {LENGTH:,} tokens, seed "
        f"{SEED}. Keys and values in int4 and int3 are first multiplied by a Hadamard matrix.\n\n"
        + table(["dtype", "bytes per token", "perplexity", "change"], cells)
        + f"\n\nPrompts of {options.prompt:,} tokens, {options.cache_gb:g} GB of KV cache. One run.\n\n"
        + table(run_headings(), runs) + "\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
