"""Refit the constants of SAWB: clipping levels of least squared error on six distributions, against the formula.

Weights are 10,001 quantiles of a distribution, so that nothing is drawn. For each set of levels the clipping level
a* of least squared error is searched; c1 and c2 are the least-squares fit of a* / E|w| = c1 sqrt(E[w^2]) / E|w| + c2
over the distributions, as the paper fits them. Von Mises has concentration 1; which one the paper used is not known.
"""

from __future__ import annotations

import numpy as np
import torch
from common import table, write
from scipy import optimize, stats
from torch import Tensor

from smelt.compression.distillation.quantizers.sawb import CONSTANTS, Sawb, clipping_level
from smelt.numerics.format import QuantParams

QUANTILES = (np.arange(10_001) + 0.5) / 10_001
DISTRIBUTIONS = {
    "Gaussian": stats.norm(),
    "uniform": stats.uniform(-1, 2),
    "Laplace": stats.laplace(),
    "logistic": stats.logistic(),
    "triangular": stats.triang(0.5, -1, 2),
    "von Mises": stats.vonmises(1.0),
}


def main() -> None:
    weights = {name: torch.from_numpy(each.ppf(QUANTILES)).float()[None] for name, each in DISTRIBUTIONS.items()}
    fits, ratios = [], []
    for (bits, zero), published in CONSTANTS.items():
        best = {name: best_level(weight, bits, zero) for name, weight in weights.items()}
        c1, c2 = fit(list(weights.values()), list(best.values()))
        fits.append(
            {"bits": bits, "zero": zero, "c1": published[0], "c2": published[1], "refit_c1": c1, "refit_c2": c2}
        )
        for name, weight in weights.items():
            alpha = float(clipping_level(weight, bits, zero))
            ratio = error(weight, bits, zero, alpha) / error(weight, bits, zero, best[name])
            by_max = error(weight, bits, zero, float(weight.abs().max())) / error(weight, bits, zero, best[name])
            ratios.append({"bits": bits, "zero": zero, "distribution": name, "alpha": alpha, "best": best[name],
                           "error_ratio": ratio, "error_ratio_of_max": by_max})  # fmt: skip
    write("sawb_constants", [*fits, *ratios], text(fits, ratios))


def best_level(weight: Tensor, bits: int, zero: bool) -> float:
    """Search the clipping level of least squared error."""
    largest = float(weight.abs().max())
    levels = np.geomspace(largest / 100, largest, 60)
    start = int(np.argmin([error(weight, bits, zero, level) for level in levels]))
    bounds = levels[max(start - 1, 0)], levels[min(start + 1, len(levels) - 1)]
    found = optimize.minimize_scalar(lambda level: error(weight, bits, zero, level), bounds=bounds, method="bounded")
    return float(found.x)


def error(weight: Tensor, bits: int, zero: bool, alpha: float) -> float:
    """Return the mean squared error of the quantizer itself at a clipping level."""
    quantizer = Sawb(bits, zero)
    level = torch.full((1, 1, 1), alpha)
    steps = 2 ** (bits - 1) - 1 if zero else 2**bits - 1
    qparams = QuantParams(level / steps) if zero else QuantParams(2 * level / steps, torch.full_like(level, steps / 2))
    groups = quantizer.format.split_groups(weight)
    values = quantizer.format.dequantize_groups(quantizer.encode(groups, qparams), qparams)
    return float((values - groups).double().square().mean())


def fit(weights: list[Tensor], levels: list[float]) -> tuple[float, float]:
    magnitudes = [float(weight.abs().mean()) for weight in weights]
    shapes = [float(weight.square().mean().sqrt()) / mean for weight, mean in zip(weights, magnitudes, strict=True)]
    relative = [level / mean for level, mean in zip(levels, magnitudes, strict=True)]
    c1, c2 = np.polyfit(shapes, relative, 1)
    return float(c1), float(c2)


def text(fits: list[dict[str, float]], ratios: list[dict[str, float]]) -> str:
    words = {(row["bits"], row["zero"]): f"{row['bits']} {'with' if row['zero'] else 'without'} zero" for row in fits}
    constants = table(
        ["bits", "c1", "c2", "c1, refit", "c2, refit"],
        [[words[r["bits"], r["zero"]], f"{r['c1']:.3f}", f"{r['c2']:.3f}", f"{r['refit_c1']:.3f}",
          f"{r['refit_c2']:.3f}"] for r in fits],
    )  # fmt: skip
    errors = table(
        ["bits", *DISTRIBUTIONS],
        [[word, *(f"{r['error_ratio']:.3f} ({r['error_ratio_of_max']:.3g})" for r in ratios
                  if (r["bits"], r["zero"]) == key)] for key, word in words.items()],
    )  # fmt: skip
    return f"""# Constants of SAWB

`python benchmarks/sawb_constants.py`

The published constants, which Smelt uses, and those that a fit over six distributions gives:

{constants}

Squared error at the level of the published formula, relative to the least one (in parentheses: at the largest
magnitude). Above 5 bits the formula clips bounded distributions far too much; use `minmax` or `lsq` there:

{errors}"""


if __name__ == "__main__":
    main()
