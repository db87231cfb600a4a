"""The overhead of `auto` where no method pays: alternating cells of plain DDP and of `auto`.

    PYTHONPATH=src:benchmarks python benchmarks/train_auto_overhead.py [--sizes small,large] [--pairs 5] [--steps 60]

Four ranks on this machine's loopback, the models of `train_time.py`. Cells alternate, since times drift by more than
the difference: every cell of `auto` is compared with those of plain DDP before and after it. The time of a cell is the
median step of its second half, after `auto` has decided; the table says what it chose.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from common import table, write
from train_runs import WORKERS, Cell, run_cells, words
from train_time import SIZES, cell_of

METHOD = "auto@0.01"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=words, default=list(SIZES))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    rows: list[Row] = []
    for size in options.sizes:
        times: dict[str, list[float]] = {"none": [], METHOD: []}
        parameters, chosen = 0, set()
        for result in run_cells(_cells(size, options.pairs, options.steps)):
            method = result["name"].split()[2]
            times[method].append(result["step_seconds"] * 1e3)
            parameters = result["parameters"]
            if method == METHOD:
                chosen.add(str(result["chosen"] or "none"))
        rows.append({"size": size, "parameters": parameters, "ms": times, "chosen": sorted(chosen), **ratios(times)})
        write("train_auto_overhead", rows, _text(rows, options.steps))


def _cells(size: str, pairs: int, steps: int) -> list[Cell]:
    """Plain DDP first and last."""
    cells = []
    for position, method in enumerate(["none", METHOD] * pairs + ["none"]):
        cell = cell_of("free", size, method, 0, None)
        cell["name"] = f"free {size} {method} {position}"
        cell["config"] |= {"steps": steps, "evaluate": {"every": steps, "samples": 512}}
        cells.append(cell)
    return cells


def ratios(times: dict[str, list[float]]) -> Row:
    """Compare each cell of `auto` with the mean of its neighbors."""
    plain = times["none"]
    results = [own / ((plain[at] + plain[at + 1]) / 2) for at, own in enumerate(times[METHOD])]
    return {"ratios": results, "ratio": statistics.median(results)}


def _text(rows: list[Row], steps: int) -> str:
    lines = [
        [f"{row['parameters']:,}", _span(row["ms"]["none"]), _span(row["ms"][METHOD]), ", ".join(row["chosen"]),
         f"{row['ratio']:.3f} ({min(row['ratios']):.3f} to {max(row['ratios']):.3f})"]
        for row in rows
    ]  # fmt: skip
    heads = [
        "parameters",
        "plain DDP, ms per step",
        "`auto`, ms per step",
        "chose",
        "ratio to its neighbors: median (all)",
    ]
    return (
        "# The overhead of `auto` where no method pays\n\n"
        f"{WORKERS} ranks on one machine, joined by its loopback (gloo), one thread each; {steps} steps per cell; "
        "cells of plain DDP and of `auto` alternate. Median step of the second half of a cell: its median over cells, "
        "and the lowest and highest.\n\n" + table(heads, lines) + "\n"
    )


def _span(times: list[float]) -> str:
    return f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})"


if __name__ == "__main__":
    main()
