"""A non-uniform model on one GPU, layers with their own widths, heads and bits, against uniform ones of the same bytes.

    PYTHONPATH=src:benchmarks:benchmarks/serve python benchmarks/serve/gpu_nonuniform.py [--shape 8b] [--streams 1 16]

Odd layers keep three quarters of their FFN channels and of their KV groups with their heads; of three layers in a row
one is bf16, one int4 and one FP8. The uniform models have one format, and the FFN width that gives the same bytes. What
is compared is the share of the copy bandwidth that a decode step reaches. Decode steps may only replay captured graphs,
which is checked.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from common import table, write
from gpu_engine import ANSWER, CONTEXT, PROMPT, SEED, random_network
from gpu_formats import VARIANTS, quantize_block, weight_bytes

from smelt.compression.pruning.repair import cut
from smelt.measure.machine import copy_bandwidth
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from smelt.models.quantized import QuantizedLinear
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.throughput import measure_batch

STREAMS = (1, 16, 64)
CYCLE = ("bf16", "int4", "w8a8-fp8")  # formats of three layers in a row
KEPT = 0.75  # of the units of odd layers
ALIGNMENT = 128  # of FFN widths
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8b", choices=["tiny", "1b", "8b"])
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--tokens", nargs=2, type=int, default=[PROMPT, ANSWER], help="of a prompt and of its answer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-cache-gb", type=float, default=40)
    parser.add_argument("--name", default="serve_gpu_nonuniform", help="of the results file")
    options = parser.parse_args()
    bandwidth = copy_bandwidth(torch.device(options.device))
    network = nonuniform_network(options.shape, options.device)
    target = weight_bytes(network)
    rows = measure("non-uniform", network, options, bandwidth)
    for name in CYCLE:
        del network
        gc.collect()  # an engine and its captured graphs refer to each other
        if options.device == "cuda":
            torch.cuda.empty_cache()
        network = uniform_network(options.shape, options.device, name, target)
        rows += measure(f"uniform {name}", network, options, bandwidth)
        write(options.name, rows, text(rows, options, bandwidth))


def nonuniform_network(shape: str, device: str) -> Any:
    network = random_network(shape, device)
    parts = anatomy_of(network).parts
    cut(network, [np.arange(_kept_units(part.units, part.kind) if part.block % 2 else part.units) for part in parts])
    for index, block in enumerate(network.model.layers):
        quantize_block(block, VARIANTS[CYCLE[index % len(CYCLE)]])
    return network


def _kept_units(units: int, kind: str) -> int:
    kept = int(units * KEPT)
    return kept if kind == "heads" else kept // ALIGNMENT * ALIGNMENT


def uniform_network(shape: str, device: str, name: str, target: int) -> Any:
    """Return a network with one format whose FFN width makes it as large as `target` bytes, as far as it can be."""
    width = _ffn_width(shape, name, target)
    network = random_network(shape, device, intermediate_size=width)
    for block in network.model.layers:
        quantize_block(block, VARIANTS[name])
    return network


def _ffn_width(shape: str, name: str, target: int) -> int:
    """Solve for the width: bytes are linear in it, so two widths tell."""
    sizes = {}
    for width in (ALIGNMENT, 2 * ALIGNMENT):
        network = random_network(shape, "cpu", intermediate_size=width, num_hidden_layers=1)
        without_block = weight_bytes(network) - _block_bytes(network)
        quantize_block(network.model.layers[0], VARIANTS[name])
        sizes[width] = _block_bytes(network)
    layers = _num_layers(shape)
    per_column = layers * (sizes[2 * ALIGNMENT] - sizes[ALIGNMENT]) / ALIGNMENT
    fixed = without_block + layers * sizes[ALIGNMENT] - per_column * ALIGNMENT
    return max(1, round((target - fixed) / per_column / ALIGNMENT)) * ALIGNMENT


def _block_bytes(network: Any) -> int:
    block = network.model.layers[0]
    return sum(tensor.nbytes for tensor in (*block.parameters(), *block.buffers()))


def _num_layers(shape: str) -> int:
    from gpu_engine import SHAPES, TINY

    return int((TINY if shape == "tiny" else SHAPES[shape])["num_hidden_layers"])


def measure(name: str, network: Any, options: argparse.Namespace, bandwidth: float) -> list[Row]:
    prompt, answer = options.tokens
    stored = weight_bytes(network)
    engine = Engine(
        Model(network), max_model_len=max(CONTEXT, prompt + answer), max_num_seqs=256, max_num_batched_tokens=8192,
        kv_cache_bytes=int(options.kv_cache_gb * 10**9), enable_prefix_caching=False,
    )  # fmt: skip
    modules = [module for module in network.modules() if isinstance(module, QuantizedLinear)]
    facts = {
        "model": name, "weight_bytes": stored, "backend": engine.backend,
        "kernels": dict(Counter(layer.backend for layer in modules)),
        "ffn_widths": sorted({block.mlp.down_proj.in_features for block in network.model.layers}),
    }  # fmt: skip
    rows = []
    for count in options.streams:
        measure_batch(engine, [(prompt, 12)] * count, math.inf, SEED, 1.0)  # warmup: capture and compile
        replays = _forbid_eager_decode(engine) if options.device == "cuda" else []
        row, _ = measure_batch(engine, [(prompt, answer)] * count, math.inf, SEED + 1, stored / bandwidth)
        if options.device == "cuda":
            assert len(replays) >= answer - 1, Counter(replays)  # smaller ones too while prompts are read
            engine.runner.__dict__.pop("_captured_graph"), engine.runner.__dict__.pop("_forward_decode")
        rows.append({**facts, **asdict(row), "graph_replays": len(replays)})
        print(rows[-1], flush=True)
    return rows


def _forbid_eager_decode(engine: Engine) -> list[int]:
    """Make a decode step outside of a captured graph an error; return a list that gets the size of each replay."""
    runner: Any = engine.runner
    captured_graph, replays = runner._captured_graph, list[int]()

    def counted(size: int, *options: Any) -> Any:
        replays.append(size)
        return captured_graph(size, *options)

    def eager(*_: Any, **__: Any) -> Any:
        raise AssertionError("a decode step ran outside of a captured graph")

    runner._captured_graph, runner._forward_decode = counted, eager
    return replays


def text(rows: list[Row], options: argparse.Namespace, bandwidth: float) -> str:
    cells = [
        [
            row["model"], f"{row['weight_bytes'] / 1e9:.2f} GB", " and ".join(map(str, row["ffn_widths"])),
            str(row["streams"]), f"{row['tokens_per_second']:,.0f}", f"{row['decode_ms']:.2f}",
            f"{row['share_of_roofline']:.0%}", str(row["graph_replays"]),
        ]
        for row in rows
    ]  # fmt: skip
    headings = [
        "model",
        "weights",
        "FFN width",
        "streams",
        "tokens/s",
        "decode step, ms",
        "of copy bandwidth",
        "replays",
    ]
    prompt, answer = options.tokens
    return (
        "# A non-uniform model on one GPU\n\n"
        f"Llama {options.shape} shape, random weights, seed {SEED}, {prompt} tokens in, {answer} out, greedy. In the "
        f"non-uniform model, odd layers keep {KEPT:.0%} of their FFN channels and KV groups, and the formats of the "
        f"layers alternate: {', '.join(CYCLE)}. Uniform models have the FFN width that gives the same bytes. `of copy "
        f"bandwidth` counts the stored weights per decode step; a copy reaches {bandwidth / 1e12:.2f} TB/s. Every "
        "decode step was one replay of a captured graph.\n\n" + table(headings, cells)
    )


if __name__ == "__main__":
    main()
