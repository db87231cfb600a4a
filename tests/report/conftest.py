"""A run with every section of a report, as recipes provide it."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

BLOCKS, GROUPS, FILTERS = 30, 3, 1536


def _kept() -> list[dict[str, Any]]:
    draw = random.Random(7)
    rows = []
    for block in range(BLOCKS):
        groups = sorted(draw.sample(range(GROUPS), draw.choice([1, 2, 3, 3, 3])))
        kept = FILTERS - draw.randrange(0, 60) * 12
        rows.append(
            {
                "block": block,
                "heads": {"of": GROUPS, "kept": groups},
                "ffn_channels": {"of": FILTERS, "kept": kept},
                "unit": "kv group",
            }
        )
    rows[4]["heads"]["kept"] = []
    rows[5]["ffn_channels"]["kept"] = 0
    return rows


RUN: dict[str, Any] = {
    "title": "smollm2-135m, 20 % smaller",
    "model": "smollm2-135m",
    "result": "smollm2-135m-fisher",
    "created": "2026-01-17 10:20 UTC",
    "verdict": "A fifth of the blocks' parameters is gone; perplexity rose from 23.6 to 27.1; 1.21 times as fast.",
    "quality": {
        "metric": "perplexity",
        "higher_is_better": False,
        "before": 23.6,
        "after": 27.1,
        "data": "wikitext2",
        "settings": {"context": 1024, "stride": 512, "tokens": 245760},
        "comparison": {
            "difference": 3.5,
            "low": 3.31,
            "high": 3.72,
            "confidence": 0.95,
            "ratio": 1.148,
            "ratio_low": 1.139,
            "ratio_high": 1.158,
            "mcnemar_p": 0.0004,
            "flips": 1234,
            "kl": 0.1876,
            "agreement": 0.8123,
        },
    },
    "size": {
        "parameters": {"before": 134_515_008, "after": 113_279_616},
        "block_parameters": {"before": 106_200_000, "after": 84_960_000},
        "bytes": {"before": 538_060_032, "after": 453_118_464},
        "macs": {"before": 17_270_000_000, "after": 14_550_000_000, "tokens": 128},
    },
    "speed": [
        {
            "name": "forward, batch 1, 128 tokens",
            "device": "cpu",
            "before": {"median_ms": 182.4, "spread_ms": 9.1},
            "after": {"median_ms": 150.7, "spread_ms": 7.3},
            "ratio": 1.21,
            "ratio_low": 1.18,
            "ratio_high": 1.25,
        },
        {
            "name": "one decoded token, batch 1, 128 tokens before it",
            "device": "cpu",
            "before": {"median_ms": 31.25, "spread_ms": 2.4},
            "after": {"median_ms": 31.9, "spread_ms": 2.9},
            "ratio": 0.98,
            "ratio_low": 0.95,
            "ratio_high": 1.02,
        },
    ],
    "memory": {"before": 1_210_000_000, "after": 1_030_000_000},
    "kept": _kept(),
    "steps": [
        {
            "name": "fisher",
            "seconds": 61.2,
            "peak_bytes": 1_890_000_000,
            "changed": {"tensors": 210, "parameters_removed": 21_235_392},
            "facts": {"samples": 128, "length": 512, "budget": "80 % of block parameters"},
        },
        {
            "name": "reconstruct",
            "seconds": 142.0,
            "peak_bytes": 2_340_000_000,
            "changed": {"tensors": 60, "parameters_removed": 0},
            "facts": {"form": "full", "damping": 0.01},
        },
        {"name": "save and reload", "seconds": 0.84, "peak_bytes": 1_310_000_000},
    ],
    "recipe": "seed: 0\ndata: wikitext2\nsteps:\n  - fisher:\n      keep: 0.8\n  - reconstruct: full\n",
    "samples": [
        {
            "who": "before",
            "prompt": "The capital of France is",
            "text": " Paris. It is the largest city in the country.",
        },
        {
            "who": "after",
            "prompt": "The capital of France is",
            "text": " Paris, the city in which most of the people live.",
        },
    ],
    "machine": {
        "cpu": "Imaginary(R) Processor 9000",
        "cores": 2,
        "threads": 2,
        "memory_bytes": 25_275_125_760,
        "os": "Linux 6.18 (x86_64)",
        "python": "3.11.7",
        "torch": "2.13.0",
        "transformers": "5.22.2",
        "smelt": "0.1.0",
    },
    "papers": [{"method": "fisher", "citation": "Kwon et al., 2022, arXiv 2204.09656"}],
    "warnings": ["The weights of this model lie on a 4-bit grid: do not read its bytes as those of a float model."],
}


@pytest.fixture
def run() -> dict[str, Any]:
    return copy.deepcopy(RUN)
