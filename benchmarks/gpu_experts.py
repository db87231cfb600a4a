"""Mixtures of experts on a GPU: grouped GEMMs of compressed experts against bfloat16, and the engine with them.

    PYTHONPATH=src:benchmarks:benchmarks/serve python benchmarks/gpu_experts.py [--parts layers engine] [--tune]

Layers have the shapes of Mixtral 8x7B and Qwen3 30B-A3B and random inputs, so that tokens are spread over the experts.
`GEMMs` are the two grouped products alone, with inputs that are sorted and quantized already; `layer` is all of the
mixture: norm, router, sorting, gathering, products, gate and weighted sum. Times are medians of replays of a CUDA
graph, divided by its calls, which rotate over routings and over copies of the weights. PyTorch's `_grouped_mm`
multiplies the same sorted rows in bfloat16. The engine runs the Qwen3 30B-A3B shape with fewer layers. `--tune` prints
the time of every tile size instead.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from common import copy_bandwidth, graph_seconds, previous_rows, table, write
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from smelt.kernels.gpu import hopper, hopper_config, hopper_source
from smelt.kernels.gpu.experts import Routing, combine, gather_rows, route
from smelt.kernels.gpu.fused_ops import act_and_mul, act_and_mul_quantize, add_rms_norm
from smelt.kernels.gpu.grouped import GroupedDense, GroupedLinear, choose_tile_size
from smelt.kernels.gpu.hopper_grouped import GroupedHopper
from smelt.kernels.gpu.nvrtc import compile_all
from smelt.kernels.gpu.vector import fused_gemv
from smelt.kernels.linear import ActivationQuant, PackedMatrix
from smelt.models.experts import split_experts
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.numerics import get_format
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.throughput import measure_batch

SEED, CALLS, COPIES = 0, 16, 2
TOKENS, STREAMS, PROMPT, ANSWER = (1, 4, 16, 64, 256), (1, 16, 64, 128), 128, 128
Row = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    num_experts: int
    top_k: int
    hidden: int
    inner: int


SHAPES = {"Mixtral 8x7B": Shape(8, 2, 4096, 14336), "Qwen3 30B-A3B": Shape(128, 8, 2048, 768)}
FORMATS: dict[str, tuple[str, str | None]] = {  # weights, inputs
    "int4": ("int4/128@float16", None),
    "nvfp4": ("nvfp4", None),
    "mxfp4": ("mxfp4", None),
    "fp8": ("fp8-e4m3", "fp8-e4m3"),
    "w4a8-int8": ("int4/row", "int8"),
}


@dataclass(frozen=True)
class Layer:
    """The tensors of a mixture, all experts with the same values at their own addresses."""

    shape: Shape
    norm: Tensor
    router: Tensor
    gate_up: GroupedLinear
    output: GroupedLinear

    def route(self, x: Tensor) -> Routing:
        logits = fused_gemv(x, self.router) if len(x) == 1 else nn.functional.linear(x, self.router)
        sizes = sorted(set(self.gate_up.tile_sizes) & set(self.output.tile_sizes))
        tile_size = choose_tile_size(len(x), self.shape.top_k, self.shape.num_experts, sizes)
        return route(logits, self.shape.top_k, normalize=True, weight_dtype=x.dtype, tile_size=tile_size)

    def gate(self, gate_up: Tensor) -> Any:
        quant = self.output.quant
        return act_and_mul(gate_up) if quant is None else act_and_mul_quantize(gate_up, quant)

    def run(self, hidden: Tensor) -> None:
        """Run the mixture as `FusedExperts` does."""
        x = add_rms_norm(hidden, None, self.norm, 1e-6)
        routing = self.route(x)
        shared = len(x) == 1 and self.gate_up.quant is None
        inputs = x if shared else gather_rows(x, routing, self.gate_up.quant)
        combine(self.output(self.gate(self.gate_up(inputs, routing, shared=shared)), routing), routing, hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=("layers", "engine"), default=["layers", "engine"])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--layers", type=int, default=8, help="of the engine's model")
    parser.add_argument("--models", nargs="+", choices=("bf16", *FORMATS), default=["bf16", "int4", "fp8", "nvfp4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="of the layers")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--resume", action="store_true", help="add to earlier rows")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    if options.tune:
        tune(options)
        return
    rows, copy = previous_rows("gpu_experts", options.resume), copy_bandwidth()
    for name in options.shapes if "layers" in options.parts else ():
        rows += measure_layers(name, SHAPES[name], options)
        write("gpu_experts", rows, text(rows, copy))
    for name in options.models if "engine" in options.parts else ():
        rows += measure_engine(name, options.layers)
        write("gpu_experts", rows, text(rows, copy))
        gc.collect()  # an engine and its captured graphs refer to each other
        torch.cuda.empty_cache()


def make_layer(shape: Shape, name: str | None) -> Layer:
    norm = torch.ones(shape.hidden, device="cuda", dtype=torch.bfloat16)
    router = torch.randn(shape.num_experts, shape.hidden, device="cuda", dtype=torch.bfloat16)
    sizes = ((shape.inner, shape.inner), shape.hidden), ((shape.hidden,), shape.inner)
    return Layer(shape, norm, router, *(make_product(shape.num_experts, *size, name) for size in sizes))


def make_product(num_experts: int, rows: tuple[int, ...], columns: int, name: str | None) -> GroupedLinear:
    """Quantize one expert, and repeat it."""
    weights = [torch.randn(count, columns, device="cuda") / math.sqrt(columns) for count in rows]
    if name is None:
        return GroupedDense(torch.cat(weights).to(torch.bfloat16)[None].repeat(num_experts, 1, 1))
    weight, inputs = FORMATS[name]
    number_format = get_format(weight)
    packed = [PackedMatrix(number_format, len(w), columns, number_format.quantize(w).pack()) for w in weights]
    one = GroupedHopper.stack([packed], None if inputs is None else ActivationQuant(get_format(inputs)), torch.bfloat16)
    assert one is not None
    tiles, row_scale = one.weights.tiles.repeat(num_experts, 1, 1), one.weights.row_scale
    scales = None if row_scale is None else row_scale.repeat(num_experts)
    return replace(one, weights=replace(one.weights, tiles=tiles, row_scale=scales), num_experts=num_experts)


def compile_kernels(layer: Layer, counts: list[int]) -> None:
    """Compile the CUDA kernels of a layer for these numbers of tokens, in parallel."""
    shape, products = layer.shape, (layer.gate_up, layer.output)
    sources: set[str] = set()
    for tokens, product in itertools.product(counts, products):
        size = choose_tile_size(tokens, shape.top_k, shape.num_experts, product.tile_sizes)
        sources |= product.kernel_sources(tokens, shape.top_k, size, torch.bfloat16)
    list(compile_all(sources, hopper.GEMM_KERNEL, hopper.ARCHITECTURE))


def measure_layers(name: str, shape: Shape, options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    dense: dict[int, Row] = {}
    for each in (None, *options.formats):
        layers = [make_layer(shape, each) for _ in range(COPIES)]
        compile_kernels(layers[0], options.tokens)
        for tokens in options.tokens:
            seconds = layer_seconds(layers, tokens)
            row = {"part": "layers", "shape": name, "format": each or "bf16", "tokens": tokens, **seconds}
            if each is None:
                dense[tokens] = row
                row["torch_us"] = torch_us(layers, tokens)
            row |= {f"{key}_against_bf16": dense[tokens][f"{key}_us"] / row[f"{key}_us"] for key in ("gemms", "layer")}
            row["gemms_against_torch"] = dense[tokens]["torch_us"] / row["gemms_us"]
            rows.append(row)
            print(row, flush=True)
        del layers
        torch.cuda.empty_cache()
    return rows


def layer_seconds(layers: list[Layer], tokens: int) -> Row:
    """Time the GEMMs alone, and the mixture."""
    hidden = [torch.randn(tokens, layers[0].shape.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(CALLS)]
    pairs = list(zip(itertools.cycle(layers), hidden, strict=False))
    gemms = [_gemms(layer, x) for layer, x in pairs]
    whole = [lambda layer=layer, x=x: layer.run(x) for layer, x in pairs]
    return {"gemms_us": 1e6 * graph_seconds(gemms, 10), "layer_us": 1e6 * graph_seconds(whole, 10)}


def _gemms(layer: Layer, x: Tensor) -> Callable[[], Any]:
    routing = layer.route(x)
    inputs = gather_rows(x, routing, layer.gate_up.quant)
    inner = layer.gate(layer.gate_up(inputs, routing))
    return lambda: (layer.gate_up(inputs, routing), layer.output(inner, routing))


def torch_us(layers: list[Layer], tokens: int) -> float:
    """Time PyTorch's grouped GEMM in bfloat16 on the same sorted rows."""
    calls = []
    for index in range(CALLS):
        layer = layers[index % len(layers)]
        x = torch.randn(tokens, layer.shape.hidden, device="cuda", dtype=torch.bfloat16)
        routing = layer.route(x)
        counts = torch.bincount(routing.experts.flatten().long(), minlength=layer.shape.num_experts)
        ends = counts.cumsum(0).int()
        inputs = gather_rows(x, routing, None)
        inner = layer.gate(layer.gate_up(inputs, routing))
        assert isinstance(layer.gate_up, GroupedDense) and isinstance(layer.output, GroupedDense)
        first, second = layer.gate_up.matrices.transpose(1, 2), layer.output.matrices.transpose(1, 2)
        calls.append(
            lambda a=inputs, b=inner, w=first, v=second, e=ends: (
                torch._grouped_mm(a, w, offs=e),
                torch._grouped_mm(b, v, offs=e),
            )
        )
    return 1e6 * graph_seconds(calls, 10)


def random_model(layers: int, name: str) -> Model:
    config = Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
        max_position_embeddings=4096, norm_topk_prob=True,
    )  # fmt: skip
    with torch.device("meta"):
        network = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    network = network.to_empty(device="cuda").eval()
    network.model.rotary_emb = type(network.model.rotary_emb)(config).to("cuda")
    with torch.no_grad():
        for path, parameter in network.named_parameters():
            parameter.fill_(1.0) if path.endswith("norm.weight") else parameter.normal_(std=0.02)
    network = split_experts(network)
    if name != "bf16":
        quantize(network, *FORMATS[name])
    return Model(network)


def quantize(network: Any, weight: str, inputs: str | None) -> None:
    scheme = QuantizationScheme(get_format(weight), None if inputs is None else get_format(inputs))
    for block in network.model.layers:
        for path, module in list(block.named_modules()):
            if type(module) is nn.Linear:
                quantized = scheme.weight.quantize(module.weight.data.float())
                layer = QuantizedLinear.from_quantized(quantized, scheme, bias=None, dtype=torch.bfloat16)
                parent, _, child = path.rpartition(".")
                setattr(block.get_submodule(parent), child, layer)


def measure_engine(name: str, layers: int) -> list[Row]:
    model = random_model(layers, name)
    engine = Engine(
        model, max_model_len=1024, max_num_seqs=max(STREAMS), max_num_batched_tokens=8192, kv_cache_bytes=8 * 10**9,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert engine.runner.backend.startswith("fused-gpu") and "CUDA graphs" in engine.runner.backend
    rows = []
    for count in STREAMS:
        measure_batch(engine, [(PROMPT, 12)] * count, math.inf, SEED, 1.0)  # warmup: capture and compile
        row, _ = measure_batch(engine, [(PROMPT, ANSWER)] * count, math.inf, SEED + 1, 1.0)
        rows.append({"part": "engine", "format": name, "layers": layers, **asdict(row)})
        print(rows[-1], flush=True)
    return rows


def tune(options: argparse.Namespace) -> None:
    """Print the times of the GEMMs with the tiles that `choose_grouped_config` takes, then with the best ones."""
    for shape_name, name in itertools.product(options.shapes, options.formats):
        shape = SHAPES[shape_name]
        layers = [make_layer(shape, name) for _ in range(COPIES)]
        products = [layers[0].gate_up, layers[0].output]
        sources: set[str] = set()
        for tokens, product in itertools.product(options.tokens, products):
            assert isinstance(product, GroupedHopper)
            for config in candidates(product, tokens, shape):
                sources.add(hopper_source.kernel_source(product.weights.layout, config, torch.bfloat16, "early"))
        list(compile_all(sources, hopper.GEMM_KERNEL, hopper.ARCHITECTURE))
        for tokens, which in itertools.product(options.tokens, ("gate_up", "output")):
            print(
                shape_name,
                name,
                tokens,
                which,
                *time_candidates(layers, tokens, which, shape),
                sep="\n    ",
                flush=True,
            )
        del layers
        torch.cuda.empty_cache()


def candidates(product: GroupedHopper, tokens: int, shape: Shape) -> Iterator[hopper_config.Config]:
    """Yield the chosen tiles, then others: rows, teams, steps, and stages for one to four blocks at a time."""
    layout, k_tiles = product.weights.layout, product.weights.tiles.shape[1]
    size = choose_tile_size(tokens, shape.top_k, shape.num_experts, product.tile_sizes)
    chosen = product.config(tokens, shape.top_k, size)
    yield chosen
    seen = {chosen}
    for steps, (rows, m_tiles, teams), blocks in itertools.product(
        (1, 2), ((1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 1), (2, 1, 2), (4, 2, 1)), (1, 2, 3, 4)
    ):
        if (size >= 64 and (steps > 1 or blocks > 2)) or (size < 64 and rows > 2) or (blocks > 2 and rows * teams > 2):
            continue
        config = hopper_config.Config(
            size, rows, m_tiles, steps, teams, 16, 1, flush=size < 64, mma=chosen.mma and m_tiles == 1
        )
        if config.mma and rows > 1:
            continue
        fitted = hopper_config.fit_stages(config, layout, k_tiles, 227 * 1024 // blocks)
        if fitted.shared_bytes(layout) <= 227 * 1024 // blocks and fitted not in seen:
            seen.add(fitted)
            yield fitted


def time_candidates(layers: list[Layer], tokens: int, which: str, shape: Shape) -> list[str]:
    hidden = [torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16) for _ in range(CALLS)]
    work = []
    for layer, x in zip(itertools.cycle(layers), hidden, strict=False):
        product = getattr(layer, which)
        size = choose_tile_size(tokens, shape.top_k, shape.num_experts, product.tile_sizes)
        routing = layer.route(x)
        assert routing.tile_size == size
        inputs = gather_rows(x, routing, layer.gate_up.quant)
        work.append((product, routing, inputs if which == "gate_up" else layer.gate(layer.gate_up(inputs, routing))))
    times = {}
    for config in candidates(work[0][0], tokens, shape):
        calls = [lambda p=p, r=r, x=x, c=config: _product(p, r, x, c) for p, r, x in work]
        times[config] = 1e6 * graph_seconds(calls, 5)
    chosen, best = next(iter(times)), sorted(times, key=times.__getitem__)[:3]
    return [f"{times[config]:.1f} us {config}" for config in (chosen, *best)]


def _product(product: GroupedHopper, routing: Routing, x: Any, config: hopper_config.Config) -> Tensor:
    codes, scales = (x, None) if isinstance(x, Tensor) else (x.codes, x.scales)
    return hopper.grouped_gemm(
        codes, product.weights, routing, config, x_scale=scales, dtype=torch.bfloat16, early=True
    )


def text(rows: list[Row], copy: float) -> str:
    layers = [
        [
            row["shape"], row["format"], str(row["tokens"]), f"{row['gemms_us']:.1f}",
            f"{row['gemms_against_bf16']:.2f}x", f"{row['gemms_against_torch']:.2f}x", f"{row['layer_us']:.1f}",
            f"{row['layer_against_bf16']:.2f}x",
        ]
        for row in rows if row["part"] == "layers"
    ]  # fmt: skip
    engine = [row for row in rows if row["part"] == "engine"]
    dense = {row["streams"]: row["tokens_per_second"] for row in engine if row["format"] == "bf16"}
    streams = [
        [
            row["format"], str(row["streams"]), f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / dense.get(row['streams'], math.nan):.2f}x", f"{row['decode_ms']:.2f}",
            f"{row['first_token_ms']:.1f}",
        ]
        for row in engine
    ]  # fmt: skip
    headings = ["shape", "format", "tokens", "GEMMs, us", "against bf16", "against torch", "layer, us", "against bf16"]
    depth = f", {engine[0]['layers']} layers" if engine else ""
    return (
        f"# Mixtures of experts on one GPU\n\nSeed {SEED}, random weights and inputs; copy bandwidth {copy / 1e12:.2f} "
        "TB/s, read and written. `GEMMs`: both grouped products of the layer; `against torch`: against "
        "`torch._grouped_mm` in bfloat16; `layer`: the whole mixture, norm and router included.\n\n"
        + table(headings, layers)
        + f"\n\n## The engine\n\nThe Qwen3 30B-A3B shape{depth}, {PROMPT} tokens in, {ANSWER} out, greedy.\n\n"
        + table(["model", "streams", "tokens/s", "against bf16", "decode step, ms", "first token, ms"], streams)
    )


if __name__ == "__main__":
    main()
