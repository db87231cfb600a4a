"""NN-LUT: errors of trained tables with 8, 16 and 32 entries against uniform segments, in FP32, FP16 and INT32.

`--tables` also writes the tables that Smelt ships, `src/smelt/numerics/nn_lut_tables.json`. Errors are absolute, on
100,001 equally spaced inputs of the range; integer tables read 16-bit inputs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import table as markdown
from common import write
from torch import Tensor

import smelt.numerics
from smelt.compression.calibration.nn_lut import FUNCTIONS, TableFunction, TableTraining, train_table
from smelt.numerics.nn_lut import TABLES
from smelt.numerics.piecewise_linear import InputScaling, PiecewiseLinear

ENTRIES = (8, 16, 32)
STEPS = 5000
BOUND = 2**15 - 1
# The ranges of the published comparison beside the default ones; both functions are flat at the right end of theirs.
WIDE = {
    "exp (-256, 0)": FUNCTIONS["exp"].on(-256.0, 0.0),
    "1/x (1, 1024)": replace(FUNCTIONS["reciprocal"].on(1.0, 1024.0), flat="right"),
    "1/sqrt(x) (1, 1024)": replace(FUNCTIONS["rsqrt"].on(1.0, 1024.0), flat="right"),
}
REFERENCE = {  # mean and largest error with 16 entries that an independent implementation of the paper reached
    "gelu (-5, 5)": (0.0029, 0.034), "exp (-16, 0)": (2.6e-4, 0.0056), "exp (-256, 0)": (1.1e-4, 0.045),
    "1/x (1, 1024)": (1.4e-4, 0.19), "1/sqrt(x) (1, 1024)": (3.0e-4, 0.097),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="also write the tables that Smelt ships")
    arguments = parser.parse_args()
    defaults = {f"{name} ({each.low:g}, {each.high:g})": (name, each) for name, each in FUNCTIONS.items()}
    rows, shipped = [], {name: {} for name in FUNCTIONS}
    for label, target in {**{label: each for label, (_, each) in defaults.items()}, **WIDE}.items():
        for entries in ENTRIES:
            trained = train_table(target, TableTraining(entries=entries, steps=STEPS))
            rows.append({"function": label, "entries": entries, **errors(target, trained)})
            print(rows[-1], flush=True)
            if label in defaults:
                shipped[defaults[label][0]][str(entries)] = plain(trained)
    if arguments.tables:
        folder = Path(smelt.numerics.__file__).parent
        (folder / TABLES).write_text(json.dumps(shipped, indent=1) + "\n")
    wide = replace(FUNCTIONS["rsqrt"].on(0.1, 1024.0), flat="right")
    scaling = small_inputs(
        train_table(wide, TableTraining(steps=STEPS)),
        train_table(WIDE["1/sqrt(x) (1, 1024)"], TableTraining(steps=STEPS)),
    )
    write("nn_lut", [*rows, scaling], text(rows, scaling))


def errors(target: TableFunction, trained: PiecewiseLinear) -> dict[str, float]:
    """Return mean and largest error of every form, and the integers' largest distance in steps of an int8 output."""
    x = torch.linspace(target.low, target.high, 100_001, dtype=torch.float64)
    y = target.function(x)
    scale = max(abs(target.low), abs(target.high)) / BOUND
    q = (x / scale).round().long()
    integers = trained.to_integer(scale, BOUND)
    same_inputs = trained(q.double() * scale)
    results = integers(q).double() * integers.output_scale
    step = float(y.abs().max()) / 127
    uniform = PiecewiseLinear.uniform(target.function, target.low, target.high, trained.entries)
    return {
        **absolute("uniform", uniform(x) - y),
        **absolute("float32", trained.to(torch.float32)(x.float()).double() - y),
        **absolute("float16", trained.to(torch.float16)(x.half()).double() - target.function(x.half().double())),
        **absolute("int32", results - target.function(q.double() * scale)),
        "int32_steps": float((results - same_inputs).abs().max()) / step,
    }


def absolute(name: str, difference: Tensor) -> dict[str, float]:
    return {f"{name}_mean": float(difference.abs().mean()), f"{name}_max": float(difference.abs().max())}


def small_inputs(raw: PiecewiseLinear, normalized: PiecewiseLinear) -> dict[str, Any]:
    """Compare 1/sqrt(x) on (0.1, 1024) by one table, and with inputs below 1 multiplied by 2^10."""
    x = torch.linspace(0.1, 1024, 1_000_001, dtype=torch.float64)
    x = torch.cat((x, torch.linspace(0.1, 1, 100_001, dtype=torch.float64)))
    scaled = InputScaling(-0.5)(normalized, x)
    return {
        "function": "1/sqrt(x) (0.1, 1024)", "entries": 16,
        "raw_max": float((raw(x) - x.rsqrt()).abs().max()), "scaled_max": float((scaled - x.rsqrt()).abs().max()),
    }  # fmt: skip


def plain(trained: PiecewiseLinear) -> dict[str, list[float]]:
    return {name: getattr(trained, name).tolist() for name in PiecewiseLinear.__match_args__}


def pair(row: dict[str, Any], name: str) -> str:
    return f"{row[f'{name}_mean']:.2g} / {row[f'{name}_max']:.2g}"


def text(rows: list[dict[str, Any]], scaling: dict[str, Any]) -> str:
    table = markdown(
        ["function (range)", "entries", "uniform segments", "NN-LUT FP32", "FP16", "INT32", "uniform / NN-LUT, mean",
         "INT32 - FP32, int8 steps", "reference, 16 entries"],
        [[r["function"], str(r["entries"]), pair(r, "uniform"), pair(r, "float32"), pair(r, "float16"),
          pair(r, "int32"), f"{r['uniform_mean'] / r['float32_mean']:.1f}", f"{r['int32_steps']:.2g}",
          "{:.2g} / {:.2g}".format(*REFERENCE[r["function"]])
          if r["function"] in REFERENCE and r["entries"] == 16 else ""] for r in rows],
    )  # fmt: skip
    return f"""# NN-LUT: errors of tables

`python benchmarks/nn_lut.py`

Mean / largest absolute error. Best of 3 seeds, {STEPS} steps, breakpoints placed by curvature before training. The last
column is the figure that an independent implementation of the paper reached in 20,000 steps from random breakpoints.

{table}

1/sqrt(x) on (0.1, 1024) with 16 entries: largest error {scaling["raw_max"]:.2g} with one table for the whole range, and
{scaling["scaled_max"]:.2g} with inputs below 1 multiplied by 2^10 (and the result by 2^5)."""


if __name__ == "__main__":
    main()
