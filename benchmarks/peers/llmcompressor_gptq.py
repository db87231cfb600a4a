"""GPTQ by llm-compressor, run by benchmarks/peer_gptq.py in an environment that has it.

    python llmcompressor_gptq.py MODEL_FOLDER TOKENS.safetensors RESULT.json

TOKENS holds `calibration` [samples, length] and `test` [windows, context]; RESULT gets time and perplexity.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


def main(folder: str, tokens: str, result: str, batch: str) -> None:
    data = load_file(tokens)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in data["calibration"]]
    loader = DataLoader(rows, batch_size=int(batch))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    modifier = GPTQModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        ignore=["lm_head"],
        dampening_frac=0.01,
        actorder="static",
    )
    start = time.perf_counter()
    oneshot(
        model=network,
        dataset=loader,
        recipe=modifier,
        num_calibration_samples=len(rows),
        max_seq_length=data["calibration"].shape[1],
    )
    seconds = time.perf_counter() - start
    Path(result).write_text(json.dumps({"seconds": seconds, "perplexity": _perplexity(network, data["test"])}))


@torch.no_grad()
def _perplexity(network: torch.nn.Module, windows: torch.Tensor) -> float:
    losses = [float(network(input_ids=window[None], labels=window[None]).loss) for window in windows]
    return float(torch.tensor(losses, dtype=torch.float64).mean().exp())


if __name__ == "__main__":
    main(*sys.argv[1:])
