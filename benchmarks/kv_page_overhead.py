"""The cost of heads sharing pages: on a skewed profile of 36 layers of 8 heads, and on a profile of a real model.

    python benchmarks/kv_page_overhead.py [--profile MODEL.kv.json]

Pages of 16 tokens for a prompt of 32,768: every head on its own (the ideal), clusters over all layers, clusters within
a layer, adjacent heads, and every head as much as the largest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import table, write
from torch import Tensor

from smelt.kvcache.eviction.clusters import SCOPES, cluster_heads, num_pages, sharing_overhead
from smelt.kvcache.eviction.profile import EvictionProfile

TOKENS, SINK, WINDOW, BLOCK, SEEDS = 32768, 4, 64, 16, 3
SIZES = (2, 3, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, help="output of `smelt kv profile`")
    options = parser.parse_args()
    rows = [row for seed in range(SEEDS) for row in measured(f"skewed, seed {seed}", skewed(seed))]
    if options.profile is not None:
        profile = EvictionProfile.load(options.profile)
        rows += measured(f"{profile.shape.model_type}, {profile.scorer}", profile.rescaled(profile.keep_ratio))
    write("kv_page_overhead", rows, _text(rows))


def skewed(seed: int) -> Tensor:
    """Return budgets in which a few retrieval heads keep nearly everything, the others 1% to 33%: [36, 8]."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(36, 8, generator=generator, dtype=torch.float64)
    many = torch.rand(36, 8, generator=generator) < 0.08
    return torch.where(many, 0.8 + 0.2 * shares, 0.01 + 0.3 * shares**2)


def measured(name: str, budgets: Tensor) -> list[dict[str, Any]]:
    amounts = num_pages(budgets, TOKENS, SINK, WINDOW, BLOCK)
    rows = []
    for size in SIZES:
        row: dict[str, Any] = {"profile": name, "heads": size, "ideal": int(amounts.sum())}
        for scope in SCOPES:
            max_size = budgets.shape[1] if scope == "per_layer" else budgets.numel()
            if max_size % size == 0:
                overhead = sharing_overhead(amounts, cluster_heads(budgets, size, scope))
                row |= {scope: overhead.ratio, "monolithic": overhead.monolithic / overhead.ideal}
        if "global" in row:
            rows.append(row)
    return rows


def _text(rows: list[dict[str, Any]]) -> str:
    columns = ["global", "per_layer", "adjacent", "monolithic"]
    cells = [
        [
            row["profile"],
            str(row["heads"]),
            f"{row['ideal']:,}",
            *(f"{row[name]:.3f}" if name in row else "" for name in columns),
        ]
        for row in rows
    ]
    return (
        "# The cost of sharing pages\n\n"
        f"Pages of {BLOCK} tokens for a prompt of {TOKENS:,}, relative to the ideal in which no head shares.\n\n"
        + table(["profile", "heads per cluster", "ideal, pages of one head", *columns], cells)
        + "\n"
    )


if __name__ == "__main__":
    main()
