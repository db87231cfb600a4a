"""Time of a training step of transformer layers in FP8 against bf16: 8B-shaped and 1B-shaped, eager and compiled.

    PYTHONPATH=src:benchmarks python benchmarks/fp8_step.py [--shapes 8b 1b] [--layers 4] [--tokens 8192] [--smoke]

A step is forward and backward through the decoder layers of a Llama, without embeddings, LM head and optimizer, with
bf16 weights. The share of FP8 is that of the FLOPs of all GEMMs, attention included, by the operators that ran in eager
mode. The layers are compiled one by one, as is usual. Rows are measured in turn, in several rounds, and a row's time is
the median of all its steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import previous_rows, table, write
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from smelt.train.fp8.gemm_flops import count_gemm_flops
from smelt.train.fp8.layers import LowPrecisionTraining
from smelt.train.fp8.scaled import convert_to_float8_training, has_native_gemm
from smelt.train.fp8.settings import SCALINGS, Fp8Settings

SHAPES: dict[str, dict[str, int]] = {  # of Llama-3.1-8B and Llama-3.2-1B
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "smoke": {
        "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 64,
    },
}  # fmt: skip
GOAL = 1.25
MAX_DIFFERENCE = 0.5  # of gradients, relative to eager ones: where kernels fuse, FP8 rounds otherwise; 1 is no gradient
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", default=["8b", "1b"], choices=list(SHAPES))
    parser.add_argument("--precisions", nargs="+", default=["bf16", *SCALINGS], choices=["bf16", *SCALINGS])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="keep the rows of other shapes and modes")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, eager; no results are written")
    parser.add_argument("--name", default="fp8_step", help="of the results file")
    options = parser.parse_args()
    if options.smoke:
        options.shapes, options.modes, options.layers, options.tokens, options.seq_len = (
            ["smoke"],
            ["eager"],
            1,
            128,
            64,
        )
        options.steps = options.rounds = 1
    torch._dynamo.config.recompile_limit = 100  # rows and shapes share the code of a layer; beyond it all are eager
    previous = previous_rows(options.name, options.resume)
    rows = [row for row in previous if row["shape"] not in options.shapes or row["mode"] not in options.modes]
    for shape in options.shapes:
        rows += measure_shape(shape, options)
        if options.smoke:
            print(text(rows, options))
        else:
            write(options.name, rows, text(rows, options))


def measure_shape(shape: str, options: argparse.Namespace) -> list[Row]:
    """Return a row for each precision and mode; layers stay in memory, so that rounds alternate between them."""
    steps: list[tuple[Row, Callable[[], None]]] = []
    for precision in options.precisions:
        for mode in options.modes:
            steps.append(prepare(shape, precision, mode, options))
            print(f"{shape}, {precision}, {mode}: ready", flush=True)
    for _ in range(options.rounds):
        for row, step in steps:
            row["seconds"] += [timed(step, options.device) for _ in range(options.steps)]
    rows = [row for row, _ in steps]
    for row in rows:
        baseline = next((each for each in rows if each["precision"] == "bf16" and each["mode"] == row["mode"]), None)
        row["median"] = statistics.median(row["seconds"])
        row["speedup"] = statistics.median(baseline["seconds"]) / row["median"] if baseline else None
    steps.clear()
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return rows


def prepare(shape: str, precision: str, mode: str, options: argparse.Namespace) -> tuple[Row, Callable[[], None]]:
    """Build the layers; return facts and a function that runs a step."""
    torch.manual_seed(0)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    config = LlamaConfig(
        **SHAPES[shape], num_hidden_layers=options.layers, vocab_size=256, max_position_embeddings=options.seq_len
    )
    with device:
        network = LlamaForCausalLM(config).to(torch.bfloat16).train()
    training = LowPrecisionTraining()
    if precision != "bf16":
        training = convert_to_float8_training(network, Fp8Settings(precision))
    batch = max(options.tokens // options.seq_len, 1), options.seq_len, config.hidden_size
    x = torch.randn(batch, device=device, dtype=torch.bfloat16)
    grad = torch.randn(batch, device=device, dtype=torch.bfloat16) / x.numel()

    def step() -> None:
        network.zero_grad()
        hidden: Tensor = network.model(inputs_embeds=x, use_cache=False).last_hidden_state
        hidden.backward(grad)
        training.after_step()

    flops = count_gemm_flops(step)
    weight = network.model.layers[0].self_attn.q_proj.weight
    expected = weight.grad.float()  # eager
    before = counters["stats"]["unique_graphs"]
    if mode == "compiled":
        for layer in network.model.layers:
            layer.compile(dynamic=False)
    for _ in range(1 if options.smoke else 4):  # compiles; delayed scaling twice, as it has a history from step 2 on
        step()
    assert mode == "eager" or counters["stats"]["unique_graphs"] > before, "torch.compile has given up"
    difference = float((weight.grad.float() - expected).norm() / expected.norm())
    assert difference < MAX_DIFFERENCE, f"gradients of {precision}, {mode}, differ by {difference:.2f} from eager ones"
    memory = activation_bytes(step) if options.device == "cuda" else None
    native = precision != "bf16" and has_native_gemm(precision, device)
    row = {"shape": shape, "precision": precision, "mode": mode, "native": native, "seconds": [], **flops}
    row["gradient_difference"] = difference
    return {**row, "layers": options.layers, "tokens": batch[0] * batch[1], "activation_bytes": memory}, step


def activation_bytes(step: Callable[[], None]) -> int:
    """Return the memory that a step needs beyond weights, gradients and other rows."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def timed(step: Callable[[], None], device: str) -> float:
    if device != "cuda":
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def text(rows: list[Row], options: argparse.Namespace) -> str:
    cells = [
        [
            row["shape"], row["precision"], row["mode"], f"{1000 * row['median']:.2f}",
            f"{row['gemm_flops'] / row['median'] / 1e12:.0f}",
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}", f"{100 * row['fp8']:.1f} %",
            f"{100 * row['emulated']:.1f} %",
        ]
        for row in rows
    ]  # fmt: skip
    best = [row["speedup"] for row in rows if row["shape"] == "8b" and row["mode"] == "compiled" and row["native"]]
    goal = f" Best on 8B-shaped layers, compiled: {max(best):.2f} (goal {GOAL})." if best else ""
    headings = ["layers", "precision", "mode", "ms per step", "TFLOP/s", "times bf16", "GEMM FLOPs in FP8", "emulated"]
    return (
        f"# A training step of transformer layers in FP8\n\n{options.layers} decoder layers, {options.tokens} tokens "
        f"in sequences of {options.seq_len}, forward and backward, bf16 weights; medians of "
        f"{options.steps * options.rounds} steps in {options.rounds} rounds.{goal}\n\n" + table(headings, cells)
    )


if __name__ == "__main__":
    main()
