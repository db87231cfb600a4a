"""Simulate the coverage of the intervals, and how often the quality gate passes a model exactly at its margin.

Perplexity: windows whose log ratio is a first-order autoregression with the given lag-1 correlation. Accuracy: items
lost and gained at given rates. F1, Matthews and Spearman: noisy predictions. The baseline is the bootstrap over single
items that `smelt.compare` used before.

    python benchmarks/gate_coverage.py [--replicates 20000] [--jobs 2]
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import common
import numpy as np
from scipy import signal, stats

from smelt.measure.bootstrap import sample_counts
from smelt.measure.eval_result import EvalResult
from smelt.measure.gate import CONFIDENCE, Margin, bound_level, gate
from smelt.measure.intervals import method_of, paired_quantiles
from smelt.measure.metrics import METRICS

SEED = 0
RESAMPLES = 500
CHUNK = 250  # replicates of one task of a worker
MARGIN = 0.01
NAMES = ("coverage", "false_acceptance", "baseline_coverage", "baseline_false_acceptance")
Pair = tuple[EvalResult, EvalResult]


def autoregression(generator: np.random.Generator, items: int, correlation: float) -> np.ndarray:
    """Return a first-order autoregression with unit variance. [items]"""
    noise = generator.normal(size=items)
    noise[1:] *= math.sqrt(1 - correlation**2)
    return np.asarray(signal.lfilter([1.0], [1.0, -correlation], noise))


def texts(generator: np.random.Generator, windows: int, correlation: float) -> Pair:
    """Return perplexities of which the true ratio is 1 + MARGIN."""
    weights = np.full(windows, 511.0)
    base = 3 + 0.4 * autoregression(generator, windows, correlation)
    new = base + math.log1p(MARGIN) + 0.03 * autoregression(generator, windows, correlation)
    results = [
        EvalResult("perplexity", math.exp(items.mean()), False, "text", items, weights=weights) for items in (new, base)
    ]
    return results[0], results[1]


def answers(generator: np.random.Generator, items: int, lost: float, gained: float) -> Pair:
    """Return accuracies of which the true drop is `lost - gained`."""
    labels = np.zeros(items, dtype=int)
    draw = generator.random(items)
    new, base = (draw < lost).astype(int), ((draw >= lost) & (draw < lost + gained)).astype(int)
    return classified("accuracy", new, labels), classified("accuracy", base, labels)


def classified(metric: str, predictions: np.ndarray, labels: np.ndarray) -> EvalResult:
    value = float(METRICS[metric](predictions, labels))
    items = (predictions == labels).astype(float)
    return EvalResult(metric, value, True, "data", items, predictions=predictions, labels=labels)


def predictions(generator: np.random.Generator, items: int, metric: str) -> Pair:
    """Return a base model with 10 % errors and a new one that changes 6 %; for Spearman, numbers with noise."""
    if metric == "spearman":
        labels = generator.normal(size=items)
        base = labels + generator.normal(scale=0.5, size=items)
        return classified(metric, base + generator.normal(scale=0.3, size=items), labels), classified(
            metric, base, labels
        )
    labels = (generator.random(items) < 0.4).astype(int)
    base = np.where(generator.random(items) < 0.1, 1 - labels, labels)
    return classified(metric, np.where(generator.random(items) < 0.06, 1 - base, base), labels), classified(
        metric, base, labels
    )


@cache
def widened_level(level: float, items: int) -> float:
    """Return the percentile that the baseline takes, widened by the ratio of Student's t to normal quantiles."""
    return float(stats.norm.cdf(math.sqrt(items / (items - 1)) * stats.t.ppf(level, items - 1)))


def item_bootstrap(new: EvalResult, base: EvalResult, seed: int) -> Callable[[float], float]:
    """Return the quantiles of the baseline: percentiles over single items, of the ratio or the difference."""
    items, changes = len(new.items), new.items - base.items
    if new.metric == "accuracy":  # the resampled counts of lost, gained and unchanged items
        shares = [np.mean(changes < 0), np.mean(changes > 0), np.mean(changes == 0)]
        drawn = np.random.default_rng(seed).multinomial(items, shares, RESAMPLES)
        values = (drawn[:, 1] - drawn[:, 0]) / items
    elif new.metric == "perplexity":
        values = np.exp(np.concatenate([counts @ changes / items for counts in sample_counts(items, RESAMPLES, seed)]))
    else:
        metric = METRICS[new.metric]
        values = np.concatenate(
            [
                metric(new.predictions, new.labels, counts) - metric(base.predictions, base.labels, counts)
                for counts in sample_counts(items, RESAMPLES, seed)
            ]
        )
    return lambda level: float(np.quantile(values, widened_level(level, items)))


def simulate(number: int, chunk: int) -> np.ndarray:
    """Return how often truth is covered and the model accepted in one chunk of a row: the method's, the baseline's."""
    _, draw, truth = settings()[number]
    generator = np.random.default_rng([SEED, number, chunk])
    totals = np.zeros(4)
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        new, base = draw(generator)
        quantiles = paired_quantiles(new, base, RESAMPLES, seed)
        for position, quantile in enumerate((quantiles.ratio or quantiles.difference, item_bootstrap(new, base, seed))):
            totals[2 * position] += quantile(0.025) - 1e-12 <= truth <= quantile(0.975) + 1e-12
            # The gate accepts if the bound of the drop is below the margin, which is the true drop here.
            level = (bound_level(CONFIDENCE), CONFIDENCE)[position]
            totals[2 * position + 1] += quantile(level) < truth if quantiles.ratio else quantile(1 - level) > truth
    return totals


@cache
def settings() -> list[tuple[dict[str, Any], Callable[[np.random.Generator], Pair], float]]:
    """Return what is simulated: metric, items, setting and method; a pair of results; the true difference or ratio."""
    rows: list[tuple[dict[str, Any], Callable[[np.random.Generator], Pair], float]] = []
    for windows, correlation in itertools.product((30, 100, 300), (0.0, 0.3, 0.5, 0.7)):
        row = {"metric": "perplexity", "items": windows, "setting": f"correlation {correlation}"}
        rows.append((row, partial(texts, windows=windows, correlation=correlation), 1 + MARGIN))
    for items, (lost, gained) in itertools.product(
        (100, 300, 1000, 3000), ((0.015, 0.005), (0.03, 0.02), (0.08, 0.07))
    ):
        row = {"metric": "accuracy", "items": items, "setting": f"lost {lost:.1%}, gained {gained:.1%}"}
        rows.append((row, partial(answers, items=items, lost=lost, gained=gained), gained - lost))
    for metric in ("f1", "matthews", "spearman"):
        new, base = predictions(np.random.default_rng(SEED), 4_000_000, metric)
        for items in (100, 300):
            row = {"metric": metric, "items": items, "setting": "noisy predictions"}
            rows.append((row, partial(predictions, items=items, metric=metric), new.value - base.value))
    return [({**row, "method": method_of(row["metric"])}, draw, truth) for row, draw, truth in rows]


def power(replicates: int) -> list[dict[str, Any]]:
    """Return how often a model as good as the base model passes with the estimated number of items."""
    generator = np.random.default_rng(SEED)
    rows = []
    for metric, margin in (("accuracy", Margin(MARGIN, "pt")), ("perplexity", Margin(MARGIN, "%"))):
        needed, passed = [], 0
        while len(needed) < replicates:
            draw = (
                (lambda n: answers(generator, n, 0.03, 0.03))
                if metric == "accuracy"
                else (lambda n: equal(generator, n))
            )
            first = gate(*draw(300 if metric == "accuracy" else 16), margin, resamples=RESAMPLES)
            if first.items_needed is None or first.drop > 0:
                continue
            needed.append(first.items_needed)
            passed += gate(*draw(first.items_needed), margin, resamples=RESAMPLES).passed
        rows.append({"metric": metric, "items_needed": float(np.median(needed)), "power": passed / replicates})
    return rows


def equal(generator: np.random.Generator, windows: int) -> Pair:
    new, base = texts(generator, windows, 0.5)
    items = new.items - math.log1p(MARGIN)
    return EvalResult("perplexity", math.exp(items.mean()), False, "text", items, weights=new.weights), base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicates", type=int, default=20_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    chunks = math.ceil(options.replicates / CHUNK)
    replicates = chunks * CHUNK
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # for the workers, which would share the cores
    rows = []
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for number, (row, _, _) in enumerate(settings()):
            totals = sum(pool.starmap(simulate, [(number, chunk) for chunk in range(chunks)]))
            rows.append({**row, **dict(zip(NAMES, (totals / replicates).tolist(), strict=True))})
            print(rows[-1], flush=True)
    powers = power(max(10, replicates // 50))
    cells = [
        [row["metric"], str(row["items"]), row["setting"], row["method"], *(f"{row[name]:.3f}" for name in NAMES)]
        for row in rows
    ]
    error = math.sqrt(0.05 * 0.95 / replicates)
    text = f"""# Coverage of the intervals and false acceptance of the gate

{replicates:,} replicates per row, {RESAMPLES} resamples each, seed {SEED}.
The nominal coverage is 0.95 and the nominal false acceptance 0.05, with a simulation error of {error:.4f} (one standard
deviation). False acceptance is how often the gate passes a model whose true drop is exactly the margin. The baseline is
a bootstrap over single items.

"""
    headings = ["metric", "items", "setting", "method", "coverage", "false acceptance", "baseline coverage"]
    text += common.table([*headings, "baseline false acceptance"], cells)
    text += "\n\nPass rate of a model as good as the base model, with the number of items that the gate asked for:\n\n"
    text += common.table(
        ["metric", "items needed, median", "passed (target 0.80)"],
        [[row["metric"], f"{row['items_needed']:.0f}", f"{row['power']:.3f}"] for row in powers],
    )
    common.write("gate_coverage", [*rows, *powers], text)


if __name__ == "__main__":
    main()
