"""Tokens per second of families that differ from Llama, compiled and eager, on CPU.

    PYTHONPATH=benchmarks:. python benchmarks/serve/cpu_families.py [--families gpt_oss,gemma3_text] [--streams 1,8]

Random float32 weights of medium size, 64 tokens in and 32 out; both ways in turns, the best of three. Compiled runs
assert that the compiled program ran. Writes results/serve_cpu_families.{json,md}.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import table, write
from tests.architectures import tiny_config
from transformers import AutoModelForCausalLM

from smelt.models.experts import split_experts
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.throughput import measure_batch

SEED, PROMPT, OUTPUT, RUNS = 0, 64, 32, 3
SIZES: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
DENSE: dict[str, Any] = {**SIZES, "intermediate_size": 1536}
SPARSE: dict[str, Any] = {**SIZES, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "gemma3_text": DENSE,
    "phi3": {**DENSE, "original_max_position_embeddings": 512},
    "granite": DENSE,
    "olmo2": DENSE,
    "glm4": DENSE,
    "qwen3_moe": {**SPARSE, "num_experts": 8, "moe_intermediate_size": 768},
    "gpt_oss": {**SPARSE, "num_local_experts": 8, "intermediate_size": 768},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--streams", default="1,8")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.families.split(","):
        for streams in map(int, arguments.streams.split(",")):
            rows.append(measure(name, streams))
            print(rows[-1], flush=True)
    headings = ["family", "streams", "compiled, tokens/s", "eager, tokens/s", "ratio"]
    cells = [
        [row["family"], str(row["streams"]), f"{row['compiled']:.1f}", f"{row['eager']:.1f}", f"{row['ratio']:.2f}x"]
        for row in rows
    ]
    text = f"Random float32 weights, seed {SEED}, hidden size 512, 8 layers, {PROMPT} tokens in, {OUTPUT} out, greedy; "
    text += f"tokens generated over the total time, prompts included, the best of {RUNS} runs in turns."
    write("serve_cpu_families", rows, f"# Families on CPU, compiled and eager\n\n{text}\n\n{table(headings, cells)}")


def measure(name: str, streams: int) -> dict[str, Any]:
    engines = {way: build(name, streams, way == "compiled") for way in ("compiled", "eager")}
    for way, engine in engines.items():
        assert engine.runner.backend == ("compiled-cpu" if way == "compiled" else "eager")
    best = dict.fromkeys(engines, 0.0)
    for _ in range(RUNS):
        for way, engine in engines.items():
            row, _ = measure_batch(engine, [(PROMPT, OUTPUT)] * streams, 60.0, SEED, 0.0)
            best[way] = max(best[way], row.tokens_per_second)
    return {"family": name, "streams": streams, **best, "ratio": best["compiled"] / best["eager"]}


def build(name: str, streams: int, compiled: bool) -> Engine:
    torch.manual_seed(SEED)
    network = AutoModelForCausalLM.from_config(tiny_config(name, **FAMILIES[name])).eval()
    model = Model(split_experts(network))
    return Engine(model, max_model_len=256, max_num_seqs=streams, compiled=compiled, enable_prefix_caching=False)


if __name__ == "__main__":
    main()
