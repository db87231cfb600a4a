"""The block bootstrap, for items that are neighbors in one text and therefore correlated.

Blocks of consecutive items are resampled on a circle. The block length is the automatic choice of Politis and White
(2004), with the correction of Patton, Politis and White (2009). In small samples a block bootstrap is too narrow, so
its deviations are scaled to the width of a t interval whose long-run variance is the equal-weighted cosine estimate
(Lazarus, Lewis, Stock and Watson 2018), corrected for the bias that a first-order autoregression would have in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

_COUNTS_PER_CHUNK = 2**21
_MAX_CORRELATION = 0.95  # above this a short series does not tell a correlation from a trend


def sample_counts(items: int, resamples: int, seed: int, block_length: int = 1) -> Iterator[np.ndarray]:
    """Yield how often each item occurs in each resample, in chunks of resamples. [resamples, items]"""
    generator = np.random.Generator(np.random.PCG64(seed))
    blocks = math.ceil(items / block_length)
    within_block = np.arange(block_length)
    step = max(1, _COUNTS_PER_CHUNK // items)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        starts = generator.integers(0, items, (rows, blocks))
        sampled = (starts[:, :, None] + within_block).reshape(rows, -1)[:, :items] % items
        sampled += items * np.arange(rows)[:, None]
        yield np.bincount(sampled.ravel(), minlength=rows * items).reshape(rows, items).astype(np.float64)


def automatic_block_length(series: np.ndarray) -> int:
    """Return the block length of Politis and White (2004) for the mean of a series, for circular blocks. [items]"""
    items = len(series)
    centered = series - series.mean()
    if items < 8 or not np.isfinite(series).all() or not np.any(centered):
        return 1
    run = max(5, math.ceil(math.sqrt(math.log10(items))))  # insignificant lags in a row that end the correlogram
    longest = min(math.ceil(math.sqrt(items)) + run, items - 2)
    covariances = _autocovariances(centered, min(2 * longest, items - 1))
    significant = np.abs(covariances[1 : longest + 1] / covariances[0]) >= 2 * math.sqrt(math.log10(items) / items)
    bandwidth = min(2 * _last_significant_lag(significant, run), len(covariances) - 1)
    lags = np.arange(1, bandwidth + 1)
    weights = np.minimum(1.0, 2 * (1 - lags / bandwidth))  # the flat-top lag window
    weighted = weights * covariances[1 : bandwidth + 1]
    curvature, long_run_variance = 2 * (lags * weighted).sum(), covariances[0] + 2 * weighted.sum()
    if long_run_variance <= 0:
        return 1
    length = (1.5 * (curvature / long_run_variance) ** 2 * items) ** (1 / 3)
    return max(1, min(round(length), math.ceil(min(3 * math.sqrt(items), items / 3))))


def long_run_error(series: np.ndarray) -> tuple[float, int]:
    """Return the standard error of the mean of a correlated series, and its degrees of freedom. [items]"""
    items = len(series)
    degrees = long_run_degrees(items)
    frequencies = np.pi * np.arange(1, degrees + 1) / items
    cosines = math.sqrt(2 / items) * np.cos(np.outer(frequencies, np.arange(items) + 0.5))  # [degrees, items]
    centered = series - series.mean()
    variance = float((matmul(cosines, centered[:, None]) ** 2).mean())
    correlation = _first_correlation(centered)
    # The spectrum of the autoregression at frequency 0, relative to its mean over the frequencies used.
    spectrum = (1 - correlation) ** 2 / (1 - 2 * correlation * np.cos(frequencies) + correlation**2)
    return math.sqrt(variance / float(spectrum.mean()) / items), degrees


def long_run_degrees(items: int) -> int:
    """Return how many cosines estimate the long-run variance, which are its degrees of freedom."""
    return min(items - 1, max(2, round(0.41 * items ** (2 / 3))))


def _first_correlation(centered: np.ndarray) -> float:
    """Return the lag-1 correlation, corrected for its downward bias (Marriott and Pope 1954), from 0 to 0.95.

    Half a standard error is added, because underestimating the correlation costs more coverage than overestimating it
    gains.
    """
    items = len(centered)
    variance, covariance = _autocovariances(centered, 1)
    if items < 8 or not variance > 0:
        return 0.0
    correlation = covariance / variance
    corrected = (items * correlation + 1) / (items - 4) + 0.5 * math.sqrt((1 - correlation**2) / items)
    return float(np.clip(corrected, 0.0, _MAX_CORRELATION))


def _autocovariances(centered: np.ndarray, lags: int) -> np.ndarray:
    """Return the autocovariances from lag 0 to `lags`. [lags + 1]"""
    items = len(centered)
    products = [matmul(centered[None, lag:], centered[: items - lag, None]).item() for lag in range(lags + 1)]
    return np.array(products) / items


def matmul(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Multiply [rows, inner] by [inner, columns] with sums in one order: those of BLAS depend on its threads, which
    nothing records, and a result must be reproduced to the bit."""
    product: np.ndarray = np.einsum("ri,ic->rc", left, right)
    return product


def _last_significant_lag(significant: np.ndarray, run: int) -> int:
    """Return the lag after which `run` lags are insignificant; without such a run, the last significant one."""
    for lag in range(len(significant) - run + 1):
        if not significant[lag : lag + run].any():
            return max(1, lag)
    return max(1, int(np.flatnonzero(significant)[-1]) + 1) if significant.any() else 1
