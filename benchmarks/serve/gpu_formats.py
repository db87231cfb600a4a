"""Compressed models on one GPU against the model they came from: the engine with every format, at every batch size.

    PYTHONPATH=src:benchmarks:benchmarks/serve python benchmarks/serve/gpu_formats.py [--models bf16 int4 ...]

The Llama 8B shape with random weights, 256 tokens in, 256 out by default, greedy. Every row has its own engine, as
`smelt serve` builds it; the baseline, bf16, runs in the same process before the others. Pruned models have a quarter of
the blocks' parameters removed by `magnitude` with the defaults of a recipe on this device. Requests arrive all at once:
the time to first token is the median over them.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import copy_bandwidth, previous_rows, table, write
from gpu_engine import ANSWER, CONTEXT, PROMPT, SEED, random_network
from torch import nn

from smelt.compression.base import MethodContext
from smelt.compression.budget import Budget
from smelt.compression.pruning.magnitude import Magnitude
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.numerics import get_format
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.throughput import measure_batch

STREAMS = (1, 4, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Variant:
    """A compressed model: the formats of its linear layers, lm_head excepted, and of its KV cache."""

    weight: str | None = None
    inputs: str | None = None
    pruned: bool = False
    kv_dtype: str | None = None
    mixed: str | None = None  # format of value and down projections in half of the layers, as GGUF's K_M files have


VARIANTS = {
    "bf16": Variant(),
    "int4": Variant("int4/128@float16"),
    "int3": Variant("int3/128@float16"),
    "int2": Variant("int2/128@float16"),
    "int8": Variant("int8/128@float16"),
    "nvfp4": Variant("nvfp4"),
    "mxfp4": Variant("mxfp4"),
    "nf4": Variant("nf4"),
    "q4_k": Variant("int4-float32-zero/32"),
    "q4_k_m": Variant("int4-float32-zero/32", mixed="int6/16"),
    "q5_k_m": Variant("int5-float32-zero/32", mixed="int6/16"),
    "q6_k": Variant("int6/16"),
    "w8a8-int8": Variant("int8/row", "int8"),
    "w8a8-fp8": Variant("fp8-e4m3", "fp8-e4m3"),
    "w4a8-int8": Variant("int4/row", "int8"),
    "pruned": Variant(pruned=True),
    "pruned-int4": Variant("int4/128@float16", pruned=True),
    "pruned-fp8": Variant("fp8-e4m3", "fp8-e4m3", pruned=True),
    "fp8-kv": Variant("fp8-e4m3", "fp8-e4m3", kv_dtype="fp8"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(VARIANTS),
        default=[name for name in VARIANTS if VARIANTS[name].kv_dtype is None],
    )
    parser.add_argument("--tokens", nargs=2, type=int, default=[PROMPT, ANSWER], help="of a prompt and of its answer")
    parser.add_argument("--kv-cache-gb", type=int, default=40)
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument(
        "--resume", action="store_true", help="add to earlier rows; bf16 is measured again for the new ones"
    )
    parser.add_argument(
        "--lm-head-dtype", choices=["int8"], help="of all models but bf16, whose rows stay the baseline"
    )
    parser.add_argument("--name", default="serve_gpu_formats", help="of the results file")
    options = parser.parse_args()
    rows = previous_rows(options.name, options.resume)
    run = 1 + max((row["run"] for row in rows), default=0)
    bandwidth = copy_bandwidth()
    for name in options.models:
        rows += [{"run": run, **row} for row in measure(name, VARIANTS[name], options, bandwidth)]
        write(options.name, rows, text(rows, bandwidth, *options.tokens))
        gc.collect()  # an engine and its captured graphs refer to each other
        torch.cuda.empty_cache()


def build(variant: Variant) -> Any:
    network = random_network("8b")
    if variant.pruned:
        Magnitude(budget=Budget("parameters", 0.75)).apply(Model(network), MethodContext(seed=SEED))
    for index, block in enumerate(network.model.layers):
        quantize_block(block, variant, index)
    return network


def quantize_block(block: nn.Module, variant: Variant, index: int = 1) -> None:
    """Quantize all linear layers of the block at an index to the formats of a variant."""
    if variant.weight is None:
        return
    inputs = None if variant.inputs is None else get_format(variant.inputs)
    base = QuantizationScheme(get_format(variant.weight), inputs)
    mixed = base if variant.mixed is None else QuantizationScheme(get_format(variant.mixed))
    for path, module in list(block.named_modules()):
        if isinstance(module, nn.Linear):
            scheme = mixed if index % 2 == 0 and path.endswith(("v_proj", "down_proj")) else base
            quantized = scheme.weight.quantize(module.weight.data.float())
            layer = QuantizedLinear.from_quantized(quantized, scheme, bias=None, dtype=torch.bfloat16)
            parent, _, child = path.rpartition(".")
            setattr(block.get_submodule(parent), child, layer)


def weight_bytes(network: Any) -> int:
    """Return the bytes that a decode step reads: all weights but the table of embeddings, unless it is the LM head."""
    stored = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    embeddings = network.get_input_embeddings().weight
    tied = network.get_output_embeddings().weight is embeddings
    return stored - (0 if tied else embeddings.nbytes)


def measure(name: str, variant: Variant, options: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    network, (prompt, answer) = build(variant), options.tokens
    stored, head = weight_bytes(network), None if name == "bf16" else options.lm_head_dtype
    if head is not None:
        weight = network.get_output_embeddings().weight
        stored += (
            round(weight.numel() * get_format(f"{head}/row").bits_per_value(*weight.shape[::-1]) / 8) - weight.nbytes
        )
        name = f"{name}, {head} LM head"
    start = time.perf_counter()
    engine = Engine(
        Model(network), max_model_len=max(CONTEXT, prompt + answer), max_num_seqs=256, max_num_batched_tokens=8192,
        kv_cache_bytes=options.kv_cache_gb * 10**9, kv_cache_dtype=variant.kv_dtype, enable_prefix_caching=False,
        lm_head_dtype=head,
    )  # fmt: skip
    assert engine.runner.backend.startswith("fused-gpu") and "CUDA graphs" in engine.runner.backend
    torch.cuda.synchronize()
    loading = time.perf_counter() - start
    kernels = sorted({layer.backend for layer in network.modules() if isinstance(layer, QuantizedLinear)})
    rows = []
    for count in options.streams:
        measure_batch(engine, [(prompt, 12)] * count, math.inf, SEED, 1.0)  # warmup: capture and compile
        row, _ = measure_batch(engine, [(prompt, answer)] * count, math.inf, SEED + 1, stored / bandwidth)
        facts = {"model": name, "weight_bytes": stored, "engine_seconds": loading, "kernels": kernels}
        rows.append({**facts, **asdict(row)})
        print(rows[-1], flush=True)
    return rows


def text(rows: list[dict[str, Any]], bandwidth: float, prompt: int, answer: int) -> str:
    dense = {(row["run"], row["streams"]): row for row in rows if row["model"] == "bf16"}
    cells = []
    for row in rows:
        base = dense.get((row["run"], row["streams"]))
        faster = f"{row['tokens_per_second'] / base['tokens_per_second']:.2f}x" if base else ""
        later = f"{row['first_token_ms'] / base['first_token_ms']:.2f}x" if base else ""
        cells.append([
            str(row["run"]), row["model"], str(row["streams"]), f"{row['tokens_per_second']:,.0f}", faster,
            f"{row['decode_ms']:.2f}", f"{row['first_token_ms']:.1f}", later, f"{row['share_of_roofline']:.0%}",
        ])  # fmt: skip
    headings = [
        "run",
        "model",
        "streams",
        "tokens/s",
        "against bf16",
        "decode step, ms",
        "first token, ms",
        "against bf16",
    ]
    return (
        "# Compressed models on one GPU\n\n"
        f"Llama 8B shape, random weights, seed {SEED}, {prompt:,} tokens in, {answer:,} out, greedy; tokens generated "
        "over the total time, prompts included. Every run has its own baseline. `of copy bandwidth` counts the bytes "
        "of the stored weights, embeddings "
        f"excepted, per decode step; a copy reaches {bandwidth / 1e12:.2f} TB/s.\n\n"
        + table([*headings, "of copy bandwidth"], cells)
    )


if __name__ == "__main__":
    main()
