"""How many mantissa bits an accumulator needs: the variance retention ratio, VRR (Sakr et al., 2019).

An accumulator with few mantissa bits loses small addends next to a large partial sum ("swamping"), and with them
variance of the sum. VRR is the share of the variance that remains, in closed form, for independent terms of zero mean
whose mantissas have `product_bits`, summed in order in an accumulator with `accumulator_bits`, both without the hidden
bit. It models rounding to nearest; a truncating adder loses far more.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import erf, erfc

from smelt.errors import ConfigError

MAX_LENGTH = 10**12
MAX_LOG_VARIANCE_LOST = math.log(50)  # the criterion of the paper: v(n) = exp(n (1 - VRR)) < 50
_DIRECT_TERMS = 1 << 16  # terms that are added one by one; behind them, sums are integrals
_BLOCK = 1 << 14

Array = np.ndarray


def variance_retention_ratio(
    accumulator_bits: int, product_bits: int, length: int, chunk_size: int | None = None, nonzero_ratio: float = 1.0
) -> float:
    """Return VRR in (0, 1] of a sum of `length` products, of which the share `nonzero_ratio` is not zero.

    With chunks it is the product of the ratios of both levels: within a chunk, and over the sums of chunks.
    """
    levels = _levels(accumulator_bits, product_bits, length, chunk_size, nonzero_ratio)
    return math.prod(1 - _variance_lost(accumulator_bits, bits, terms) for bits, terms in levels)


def log_variance_lost(
    accumulator_bits: int, product_bits: int, length: int, chunk_size: int | None = None, nonzero_ratio: float = 1.0
) -> float:
    """Return log v(n) = n (1 - VRR), where n counts nonzero terms; with chunks, the larger one of both levels."""
    levels = _levels(accumulator_bits, product_bits, length, chunk_size, nonzero_ratio)
    return max(terms * _variance_lost(accumulator_bits, bits, terms) for bits, terms in levels)


def min_accumulator_bits(
    product_bits: int, length: int, chunk_size: int | None = None, nonzero_ratio: float = 1.0
) -> int:
    """Return the fewest mantissa bits, at least `product_bits`, for which v(n) < 50 (with chunks, on both levels)."""
    bits = product_bits
    while log_variance_lost(bits, product_bits, length, chunk_size, nonzero_ratio) >= MAX_LOG_VARIANCE_LOST:
        bits += 1
    return bits


def _levels(
    accumulator_bits: int, product_bits: int, length: int, chunk_size: int | None, nonzero_ratio: float
) -> list[tuple[int, int]]:
    """Return mantissa bits and number of the nonzero terms of each level. A sum over a chunk grows by log2 bits."""
    _check(accumulator_bits, product_bits, length, chunk_size, nonzero_ratio)
    inner = max(round(min(chunk_size or length, length) * nonzero_ratio), 1)
    if chunk_size is None or chunk_size >= length:
        return [(product_bits, inner)]
    grown = min(accumulator_bits, product_bits + math.ceil(math.log2(inner)))
    return [(product_bits, inner), (grown, math.ceil(length / chunk_size))]


def _check(accumulator_bits: int, product_bits: int, length: int, chunk_size: int | None, nonzero_ratio: float) -> None:
    if not 1 <= product_bits <= 48 or not 1 <= accumulator_bits <= 128:
        raise ConfigError(
            f"products have 1 to 48 mantissa bits and accumulators 1 to 128, not {product_bits} and {accumulator_bits}."
        )
    if not 1 <= length <= MAX_LENGTH:
        raise ConfigError(f"an accumulation has 1 to {MAX_LENGTH:.0e} terms, not {length}.")
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"a chunk has at least one term, not {chunk_size}.")
    if not 0 <= nonzero_ratio <= 1:
        raise ConfigError(f"the share of nonzero terms is between 0 and 1, not {nonzero_ratio}.")


def _variance_lost(accumulator_bits: int, product_bits: int, length: int) -> float:
    """Return 1 - VRR, computed from what is lost: subtracting VRR from 1 would cancel."""
    n, scale = float(length), 2.0**accumulator_bits
    alpha = _shift_loss(accumulator_bits, product_bits, product_bits)
    # Full swamping starts at step i: what was added before i - alpha remains.
    weight_full, lost_full = _sum_over_steps(
        max(2, math.floor(alpha) + 1),
        length - 1,
        lambda i: _two_tails(scale / np.sqrt(i)) * _within(scale / np.sqrt(i - 1)),
        lambda i: n - i + alpha,
    )
    # Partial swamping: the accumulator is so large that an addend loses its last stage - 1 bits.
    weight_partial, lost_partial = 0.0, 0.0
    for stage in range(2, product_bits + 1):
        alpha_stage = _shift_loss(accumulator_bits, product_bits, stage - 1)
        if n > alpha_stage:
            bound = 2.0 ** (accumulator_bits - product_bits + stage)
            weight = bound * _two_tails(bound / 2 / math.sqrt(n)) * _within(bound / math.sqrt(n))
            weight_partial += weight
            lost_partial += alpha_stage * weight
    weight_none = _within(2.0 ** (accumulator_bits - product_bits + 1) / math.sqrt(n))
    return float((lost_full + lost_partial) / ((weight_full + weight_partial + weight_none) * n))


def _shift_loss(accumulator_bits: int, product_bits: int, stages: int) -> float:
    """Return alpha: the terms whose variance the truncated bits of the first stages cost."""
    total = sum(2**j * (2**j - 1) * (2 ** (j + 1) - 1) for j in range(1, stages + 1))
    return 2.0 ** (accumulator_bits - 3 * product_bits) / 3 * total


def _two_tails(x: Array | float) -> Array:
    """Return the probability that a normal variable exceeds x in magnitude: 2 Q(x)."""
    return erfc(np.asarray(x) / math.sqrt(2))


def _within(x: Array | float) -> Array:
    return erf(np.asarray(x) / math.sqrt(2))


def _sum_over_steps(
    first: int, last: int, probability: Callable[[Array], Array], loss: Callable[[Array], Array]
) -> tuple[float, float]:
    """Return the sums of q_i and of loss(i) q_i over i = first..last.

    The first terms are added one by one, in blocks. The others vary slowly, so that a sum is the integral with limits
    half a step out (the midpoint rule), by Gauss-Legendre quadrature over octaves.
    """
    weights, losses = 0.0, 0.0
    direct = min(last, first + _DIRECT_TERMS - 1)
    for start in range(first, direct + 1, _BLOCK):
        i = np.arange(start, min(start + _BLOCK, direct + 1), dtype=np.float64)
        q = probability(i)
        weights, losses = weights + float(q.sum()), losses + float((q * loss(i)).sum())
    nodes, node_weights = np.polynomial.legendre.leggauss(48)
    low, end = direct + 0.5, last + 0.5
    while low < end:
        high = min(2 * low, end)
        i = low + (high - low) / 2 * (nodes + 1)
        q = probability(i) * node_weights * (high - low) / 2
        weights, losses = weights + float(q.sum()), losses + float((q * loss(i)).sum())
        low = high
    return weights, losses
