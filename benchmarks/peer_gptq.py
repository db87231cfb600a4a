"""GPTQ in Smelt and llm-compressor: same model, calibration tokens and settings; time and perplexity on CPU.

    python benchmarks/peer_gptq.py --peer PYTHON [--seeds 3] [--samples 16] [--length 512]

PYTHON is the interpreter of an environment that has llm-compressor. Four bits, symmetric, groups of 64, damping 0.01,
act-order with static groups, for both. The bundled SmolLM2-135M is rotated first, so that the grid of its weights
helps neither. The two run in sequence; nothing else should run at the same time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import mean, shared, table, write
from safetensors.torch import save_file

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.data import load_text, text_batches
from smelt.measure.perplexity import tokenize
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantized import dequantized_weights

CONTEXT = 1024
SETTINGS = {"method": "gptq", "format": "int4-wide/64@float32", "damping": 0.01, "act_order": True}


def main() -> None:
    options = _options()
    rows = []
    for seed in range(options.seeds):
        rows.append({"seed": seed, **_pair(options, seed)})
        print(rows[-1], flush=True)
        write("peer_gptq", rows, _text(rows, options))


def _pair(options: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """Run both on one sample of the rotation and the calibration text."""
    model = load("smollm2-135m")
    METHODS.build({"method": "rotate"}).apply(model, MethodContext(seed=seed))
    train = load_text(shared() / "data/wikitext2/train.txt.gz")
    test = tokenize(model, load_text(shared() / "data/wikitext2/test.txt.gz"), options.windows * CONTEXT)
    batches = text_batches(
        train, model.tokenizer, samples=options.samples, length=options.length, batch_size=options.batch, seed=seed
    )
    windows = torch.as_tensor(test)[: options.windows * CONTEXT].view(-1, CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        return {
            "peer": _peer(options, model, batches, windows, Path(folder)),
            "ours": _ours(model, batches, windows),
        }


def _text(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    cells = [
        [
            str(row["seed"]),
            *(f"{row[who]['seconds']:.0f} s" for who in ("peer", "ours")),
            f"{row['ours']['seconds'] / row['peer']['seconds']:.2f}",
            *(f"{row[who]['perplexity']:.3f}" for who in ("peer", "ours")),
        ]
        for row in rows
    ]
    average = {who: mean([row[who]["perplexity"] for row in rows]) for who in ("peer", "ours")}
    return (
        "# GPTQ of SmolLM2-135M on the CPU, here and in llm-compressor\n\n"
        f"Four bits, symmetric, groups of 64; {options.samples} sequences of {options.length} tokens in batches of "
        f"{options.batch}; perplexity over {options.windows} windows of {CONTEXT} tokens of WikiText-2's test split. A "
        "seed draws the rotation and the sequences, for both alike. "
        f"float32: {rows[0]['ours']['dense']:.3f}. Mean perplexity over the seeds: llm-compressor "
        f"{average['peer']:.3f}, Smelt {average['ours']:.3f}.\n\n"
        + table(["seed", "llm-compressor", "Smelt", "ratio", "perplexity, llm-compressor", "perplexity, Smelt"], cells)
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, help="the interpreter of the environment that has llm-compressor")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--windows", type=int, default=16)
    return parser.parse_args()


def _peer(
    options: argparse.Namespace, model: Model, batches: list[Any], windows: torch.Tensor, folder: Path
) -> dict[str, float]:
    model.network.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    calibration = torch.cat([batch["input_ids"] for batch in batches])
    save_file({"calibration": calibration, "test": windows.contiguous()}, folder / "tokens.safetensors")
    script = Path(__file__).parent / "peers" / "llmcompressor_gptq.py"
    arguments = [folder / "model", folder / "tokens.safetensors", folder / "result.json", str(options.batch)]
    subprocess.run([options.peer, script, *arguments], check=True, cwd=folder)
    result: dict[str, float] = json.loads((folder / "result.json").read_text())
    return result


def _ours(model: Model, batches: list[Any], windows: torch.Tensor) -> dict[str, float]:
    dense = _perplexity(model.network, windows)
    start = time.perf_counter()
    METHODS.build(SETTINGS).apply(model, MethodContext(batches=batches))
    seconds = time.perf_counter() - start
    with dequantized_weights(model.network, torch.float32):
        return {"seconds": seconds, "perplexity": _perplexity(model.network, windows), "dense": dense}


@torch.no_grad()
def _perplexity(network: torch.nn.Module, windows: torch.Tensor) -> float:
    losses = [float(network(input_ids=window[None], labels=window[None]).loss) for window in windows]
    return float(torch.tensor(losses, dtype=torch.float64).mean().exp())


if __name__ == "__main__":
    main()
