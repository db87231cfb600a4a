"""LoRA adapters in the engine on one GPU: tokens per second against the base model, and against the eager module.

    PYTHONPATH=src:benchmarks:benchmarks/serve python benchmarks/serve/gpu_lora.py [--models bf16 int4] [--no-eager]

The Llama 8B shape with random weights, 256 tokens in, 256 out, greedy. Adapters have rank 16 and change all linear
layers of the blocks. One engine per model has eight of them: `base` are requests without an adapter, `1 adapter` all
for the same, `8 adapters` each for the next. `eager` runs the module with hooks, as the engine did for steps with
adapters before it had grouped kernels; its longer runs are cut off and extrapolated.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from common import table, write
from gpu_engine import ANSWER, CONTEXT, PROMPT, SEED
from gpu_formats import VARIANTS, build
from safetensors.torch import save_file

from smelt.models.model import Model
from smelt.progress import NullProgress
from smelt.runtime.decoder import linear_groups
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.throughput import measure_batch

STREAMS, RANK, ADAPTERS = (1, 16, 64), 16, 8
EAGER_SECONDS = 1.0  # of a run
USES: dict[str, int] = {"base": 0, "1 adapter": 1, "8 adapters": ADAPTERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(VARIANTS), default=["bf16", "int4"])
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--name", default="serve_gpu_lora", help="of the results file")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            rows += measure(name, options, Path(folder) / name)
            write(options.name, rows, text(rows))
            gc.collect()  # an engine and its captured graphs refer to each other
            torch.cuda.empty_cache()


def write_adapter(folder: Path, model: Model) -> Path:
    """Write one adapter of all linear layers; every slot holds a copy of it."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    paths = {module: path for path, module in model.network.named_modules()}
    tensors = {}
    for layer in (layer for group in linear_groups(model) for layer in group):
        shapes = {"A": (RANK, layer.in_features), "B": (layer.out_features, RANK)}
        for factor, shape in shapes.items():
            values = 0.01 * torch.randn(*shape, generator=generator, device="cuda")  # type: ignore[arg-type]
            tensors[f"base_model.model.{paths[layer]}.lora_{factor}.weight"] = values.bfloat16().cpu()
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def measure(name: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    model = Model(build(VARIANTS[name]))
    write_adapter(folder, model)
    settings: dict[str, Any] = {
        "max_model_len": CONTEXT, "max_num_seqs": 64, "max_num_batched_tokens": 8192, "kv_cache_bytes": 20 * 10**9,
        "enable_prefix_caching": False, "adapters": {f"adapter{index}": folder for index in range(ADAPTERS)},
    }  # fmt: skip
    engine = Engine(model, **settings)
    assert engine.runner.backend == "fused-gpu with CUDA graphs", engine.runner.backend
    warmup = warmup_seconds(engine)
    rows = []
    for count in options.streams:
        for use, adapters in USES.items():
            rows.append({"model": name, "who": use, **warmup, **timed(engine, count, adapters, math.inf)})
            print(rows[-1], flush=True)
    if options.eager:
        eager = Engine(model, **settings, compiled=False)
        for count in options.streams:
            rows.append({"model": name, "who": "8 adapters, eager", **timed(eager, count, ADAPTERS, EAGER_SECONDS)})
            print(rows[-1], flush=True)
    return rows


def warmup_seconds(engine: Engine) -> dict[str, float]:
    """Warm up; return the seconds of capturing graphs without and with adapters, kernels being compiled before."""
    runner: Any = engine.runner
    engine.warmup()
    seconds = []
    for graphs in (
        (runner._captured, runner._captured_prefill),
        (runner._captured_extended, runner._captured_extended_prefill),
    ):
        for captured in graphs:
            captured.clear()
        start = time.perf_counter()
        runner.warmup(NullProgress())
        seconds.append(time.perf_counter() - start)
    return {"capture_seconds": seconds[0], "capture_lora_seconds": seconds[1]}


def timed(engine: Engine, count: int, adapters: int, limit: float) -> dict[str, Any]:
    names = [f"adapter{index}" for index in range(adapters)] or [None]
    measure_batch(engine, [(PROMPT, 12)] * count, limit, SEED, 1.0, names)  # compile and autotune
    row, _ = measure_batch(engine, [(PROMPT, ANSWER)] * count, limit, SEED + 1, 0.0, names)
    return asdict(row)


def text(rows: list[dict[str, Any]]) -> str:
    base = {(row["model"], row["streams"]): row for row in rows if row["who"] == "base"}
    cells = []
    for row in sorted(rows, key=lambda row: (list(VARIANTS).index(row["model"]), row["streams"])):
        plain = base[row["model"], row["streams"]]
        cells.append([
            row["model"], str(row["streams"]), row["who"], f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / plain['tokens_per_second']:.2f}x", f"{row['decode_ms']:.2f}",
            f"{row['first_token_ms']:.1f}",
        ])  # fmt: skip
    captures = {row["model"]: (row["capture_seconds"], row["capture_lora_seconds"]) for row in base.values()}
    seconds = "; ".join(f"{name}: {plain:.1f} s and {lora:.1f} s" for name, (plain, lora) in captures.items())
    return (
        "# LoRA adapters on one GPU\n\n"
        f"Llama 8B shape, random weights, seed {SEED}, {PROMPT} tokens in, {ANSWER} out, greedy; tokens generated over "
        f"the total time, prompts included. Adapters of rank {RANK} of all linear layers. Capturing the graphs of "
        f"steps without and with adapters took {seconds}.\n\n"
        + table(["model", "streams", "requests", "tokens/s", "of base", "decode step, ms", "first token, ms"], cells)
    )


if __name__ == "__main__":
    main()
