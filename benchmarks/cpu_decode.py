"""Quantized decoding on CPU: SmolLM2-135M in float32, bfloat16, 8 and 4 bits, and single matrix products.

    GOMP_SPINCOUNT=2000 python benchmarks/cpu_decode.py

The variable limits busy-waiting of threads, which hurts on a machine with other load.

All use the same transformers forward with its KV cache. Candidates alternate, so that other load on the machine affects
all equally; figures are medians over the rounds. The quantized models compute in bfloat16, and every layer is checked
to use the compiled kernel. The head stays in bfloat16.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import table, write
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.kernels.linear import ActivationQuant, PackedMatrix, select_kernel
from smelt.measure.clock import stopwatch, time_call
from smelt.measure.latency import decode_latency, latency
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.numerics.catalog import get_format

GROUP = 64  # 576 inputs are not a multiple of 128
SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (2048, 2048), (8192, 2048))
TOKENS = (1, 4, 16, 128)
ROTATED = 64 * 2**20  # bytes of matrices to rotate over, more than the per-core caches
READINGS = 40
NAMES = ("float32", "bfloat16", "int8", "int4")
CLOCK = stopwatch("cpu")
Product = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load_before = os.getloadavg()[0]
    models = {name: _model(name) for name in NAMES}
    steps = [_steps(models, batch, options.rounds) for batch in (1, 16)]
    prefills = _prefills(models, options.rounds)
    parts = {name: _parts(model) for name, model in models.items()}
    for name in ("int8", "int4"):
        backends = {layer.backend for layer in quantized_layers(models[name].network).values()}
        assert backends == {"cpu-float"}, backends
    products = [result for shape in SHAPES for result in _products(*shape)]
    overhead = _overhead()
    loads = f"{load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    if spins := os.environ.get("GOMP_SPINCOUNT"):
        loads += f" (GOMP_SPINCOUNT={spins})"
    rows = [{"steps": steps, "prefills": prefills, "parts": parts, "products": products, "overhead_us": overhead}]
    write("cpu_decode", rows, _text(steps, prefills, parts, products, overhead, loads))


def _model(name: str) -> Model:
    model = load("smollm2-135m")
    if name != "float32":
        model.network.to(torch.bfloat16)
    if name.startswith("int"):
        METHODS.build({"method": "rtn", "bits": int(name[3:]), "group_size": GROUP, "symmetric": True}).apply(
            model, MethodContext()
        )
    return model


def _steps(models: dict[str, Model], batch: int, rounds: int) -> dict[str, Any]:
    """Return milliseconds per decoded token of each model, alternating between models."""
    result: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds):
        print(f"decode, batch {batch}, round {turn + 1}", file=sys.stderr)
        for name, model in models.items():
            result[name].append(decode_latency(model, prompt=128, tokens=16, batch=batch).median_ms)
    ratios = {
        name: statistics.median(b / n for b, n in zip(result["bfloat16"], result[name], strict=True)) for name in result
    }
    return {"batch": batch, "ms": {name: statistics.median(times) for name, times in result.items()}, "ratio": ratios}


def _prefills(models: dict[str, Model], rounds: int) -> dict[str, float]:
    result: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            result[name].append(latency(model, batch=1, length=128, warmup=1, repeats=3).median_ms)
    return {name: statistics.median(times) for name, times in result.items()}


def _parts(model: Model) -> dict[str, float]:
    """Return milliseconds of all blocks' linear layers in sequence, and of the head, for one token."""
    layers: list[nn.Module] = []
    for part in model.network.model.layers.modules():
        if hasattr(part, "in_features"):
            layers.append(part)
    head, dtype = model.network.lm_head, model.network.lm_head.weight.dtype
    inputs = {width: torch.randn(1, 1, width, dtype=dtype) for width in (576, 1536)}

    def all_layers() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])  # type: ignore[index]

    with torch.inference_mode():
        return {
            "layers": 1000 * float(statistics.median(time_call(all_layers, warmup=3, repeats=15))),
            "head": 1000 * float(statistics.median(time_call(lambda: head(inputs[576]), warmup=3, repeats=15))),
        }


def _products(rows: int, columns: int) -> list[dict[str, Any]]:
    """Return microseconds of one product, rotating over matrices so that no per-core cache helps."""
    print(f"products {rows} x {columns}", file=sys.stderr)
    weight = torch.randn(rows, columns) * 0.05
    sets: dict[str, list[Product]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        copies = [weight.to(dtype, copy=True) for _ in range(_copies(weight.numel() * dtype.itemsize))]
        sets[str(dtype).removeprefix("torch.")] = [lambda x, w=w: F.linear(x, w) for w in copies]
    for name in (f"int8/{GROUP}@float16", f"int4/{GROUP}@float16"):
        for inputs in (None, ActivationQuant(get_format("int8"))):
            label = name.partition("/")[0] + ("" if inputs is None else " x int8")
            sets[label] = _packed_products(name, weight, inputs)
    return [_timed(rows, columns, tokens, sets) for tokens in TOKENS]


def _timed(rows: int, columns: int, tokens: int, sets: dict[str, list[Product]]) -> dict[str, Any]:
    """Return medians of the faster half of the readings: the rest is other load on the machine."""
    x = torch.randn(tokens, columns, dtype=torch.bfloat16)
    times: dict[str, list[float]] = {name: [] for name in sets}
    with torch.inference_mode():
        for turn in range(READINGS + 2):
            for name, products in sets.items():
                product, given = products[turn % len(products)], x.float() if name == "float32" else x
                seconds = CLOCK(lambda product=product, given=given: product(given))
                times[name].append(seconds)
    result = {name: 1e6 * statistics.median(sorted(readings[2:])[: READINGS // 2]) for name, readings in times.items()}
    return {"rows": rows, "columns": columns, "tokens": tokens, "us": result}


def _copies(size: int) -> int:
    return min(READINGS, max(2, ROTATED // size))


def _packed_products(name: str, weight: Tensor, inputs: ActivationQuant | None) -> list[Product]:
    number_format = get_format(name)
    tensors = number_format.quantize(weight).pack()
    products: list[Product] = []
    for _ in range(_copies(tensors["codes"].numel())):
        packed = PackedMatrix(number_format, *weight.shape, {key: tensor.clone() for key, tensor in tensors.items()})
        kernel = select_kernel(packed, inputs, torch.bfloat16)
        assert kernel.name.startswith("cpu-"), kernel.name
        prepared = kernel.prepare(packed, inputs)
        products.append(lambda x, k=kernel, p=packed, r=prepared: k.run(x, p, inputs, None, r))
    return products


def _overhead() -> dict[str, float]:
    """Return microseconds of a call with almost nothing to compute: the Python and PyTorch overhead."""
    model = nn.Linear(32, 32, bias=False)
    number_format = get_format("int4/32@float16")
    quantized = QuantizedLinear.from_quantized(
        number_format.quantize(model.weight.detach()), QuantizationScheme(number_format), bias=None, dtype=torch.float32
    )
    x = torch.randn(1, 1, 32)
    arguments = (x, quantized.codes, quantized.scale, None, None, None, None, None, "int4/32@float16")
    with torch.inference_mode():
        calls: dict[str, Callable[[], object]] = {
            "nn.Linear": lambda: model(x),
            "QuantizedLinear": lambda: quantized(x),
            "operator in a graph": lambda: torch.ops.smelt.cpu_linear.default(*arguments),
        }
        return {
            name: 1e6 * float(statistics.median(time_call(function, warmup=200, repeats=2000)))
            for name, function in calls.items()
        }


def _text(
    steps: list[dict[str, Any]], prefills: dict[str, float], parts: dict[str, Any], products: list[dict[str, Any]],
    overhead: dict[str, float], loads: str,
) -> str:  # fmt: skip
    decode = []
    for name in NAMES:
        row = [name]
        for step in steps:
            row += [f"{1000 * step['batch'] / step['ms'][name]:.1f}", f"{step['ratio'][name]:.2f}x"]
        decode.append([*row, f"{prefills[name]:.0f} ms"])
    shares = []
    for name in NAMES:
        total, layers, head = steps[0]["ms"][name], parts[name]["layers"], parts[name]["head"]
        shares.append([name, *(f"{value:.1f}" for value in (total, layers, head, total - layers - head))])
    variants = list(products[0]["us"])
    product_rows = [
        [f"{p['rows']} x {p['columns']}", str(p["tokens"]), *(f"{p['us'][variant]:.0f}" for variant in variants)]
        for p in products
    ]
    return "\n\n".join(
        [
            "# Quantized decoding on CPU: SmolLM2-135M",
            f"Weights in groups of {GROUP}, round to nearest; prompt of 128 tokens; the head in 16 bits. Speed is in "
            f"tokens per second, ratios are to bfloat16 in the same round. Load of the machine: {loads}.",
            table(["weights", "batch 1", "ratio", "batch 16", "ratio", "prefill of 128"], decode),
            _verdict(steps, parts),
            "Where a step at batch 1 goes, in milliseconds: the linear layers of the blocks, the head, and the rest, "
            "which is attention, norms and Python, the same for all:",
            table(["weights", "step", "layers", "head", "rest"], shares),
            "One product in microseconds (faster half of 40, rotating over matrices; quantized columns with inputs in "
            "bfloat16; `x int8` quantizes them to int8):",
            table(["rows x columns", "tokens", *variants], product_rows),
            "A call with nothing to compute, in microseconds: "
            + ", ".join(f"{name} {value:.1f}" for name, value in overhead.items())
            + ".",
        ]
    )


def _verdict(steps: list[dict[str, Any]], parts: dict[str, Any]) -> str:
    """Report whether 1.5 times bfloat16 is reached, and if not, what would have to change."""
    words = []
    for name in ("int8", "int4"):
        for step in steps:
            if step["ratio"][name] < 1.5:
                words.append(f"{name} at batch {step['batch']}")
    base = steps[0]["ms"]["bfloat16"]
    bound = base / (base - parts["bfloat16"]["layers"])
    note = f"Were the linear layers free, batch 1 would gain {bound:.2f}x: the rest of the step is not touched by them."
    if not words:
        return "8 and 4 bits decode at least 1.5 times as fast as bfloat16. " + note
    return f"Below 1.5 times bfloat16: {', '.join(words)}. " + note


if __name__ == "__main__":
    main()
