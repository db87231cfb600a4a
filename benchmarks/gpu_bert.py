"""Pruning time on a GPU: a BERT-base-shaped encoder (random weights), 2,048 samples of 128 tokens.

    python benchmarks/gpu_bert.py

Random weights are fine for time, never for quality. The paper reports under 3 minutes on one GPU.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from common import table, write
from transformers import BertConfig, BertForSequenceClassification

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.measure.latency import compare_latency
from smelt.measure.memory import PeakMemory
from smelt.models.model import Model

SAMPLES, LENGTH, BATCH, KEEP = 2048, 128, 32, 0.6
SETTINGS: dict[str, dict[str, Any]] = {
    "search, rearrangement": {"repair": "none"},
    "search, rearrangement, tuning as published": {"repair": "tune", "teacher": "assistant", "published": True},
    "search, rearrangement, full reconstruction": {"repair": "full"},
    "the same, widths in multiples of 64": {"repair": "full", "multiple": 64},
}


def main() -> None:
    torch.manual_seed(0)
    base = BertForSequenceClassification(BertConfig(num_labels=2)).eval().cuda()
    batches = [_batch(seed) for seed in range(SAMPLES // BATCH)]
    METHODS.build({"method": "fisher", "budget": {"macs": KEEP}}).apply(  # kernels and libraries are loaded here
        Model(copy.deepcopy(base)), MethodContext(batches=batches[:2])
    )
    rows = []
    for name, settings in SETTINGS.items():
        model = Model(copy.deepcopy(base))
        with PeakMemory() as memory:
            start = time.perf_counter()
            METHODS.build({"method": "fisher", "budget": {"macs": KEEP}, **settings}).apply(
                model, MethodContext(batches=batches)
            )
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        rows.append({"stage": name, "seconds": seconds, "device_peak_bytes": memory.device_peak_bytes})
        print(rows[-1], flush=True)
    timings = [_timing(model, base, batch, dtype) for batch in (1, 32) for dtype in (torch.float32, torch.bfloat16)]
    write("gpu_bert", rows + timings, _text(rows, timings))


def _batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1000, 30000, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(2, (BATCH,), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _timing(pruned: Model, base: torch.nn.Module, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    new, old = Model(copy.deepcopy(pruned.network).to(dtype)), Model(copy.deepcopy(base).to(dtype))
    result = compare_latency(new, old, batch=batch, length=LENGTH, repeats=50, warmup=10)
    return {
        "batch": batch,
        "dtype": str(dtype).removeprefix("torch."),
        "dense_ms": result.base.median_ms,
        "pruned_ms": result.new.median_ms,
        "ratio": result.ratio,
        "ratio_low": result.ratio_low,
        "ratio_high": result.ratio_high,
    }


def _text(rows: list[dict[str, Any]], timings: list[dict[str, Any]]) -> str:
    stages = [[r["stage"], f"{r['seconds']:.1f} s", f"{r['device_peak_bytes'] / 1e9:.1f} GB"] for r in rows]
    speed = [
        [str(t["batch"]), t["dtype"], f"{t['dense_ms']:.2f} ms", f"{t['pruned_ms']:.2f} ms",
         f"{t['ratio']:.2f} ({t['ratio_low']:.2f}-{t['ratio_high']:.2f})"]
        for t in timings
    ]  # fmt: skip
    return (
        f"# A BERT-base-shaped encoder pruned to {KEEP:.0%} of its MACs on a GPU\n\n"
        f"{SAMPLES} samples of {LENGTH} tokens, mini-batches of {BATCH}, float32, random weights; loading excluded.\n\n"
        + table(["stages", "time", "peak GPU memory"], stages)
        + f"\n\nForward of {LENGTH} tokens, dense and pruned alternating:\n\n"
        + table(["batch", "dtype", "dense", "pruned", "speed-up (95 % interval)"], speed)
    )


if __name__ == "__main__":
    main()
