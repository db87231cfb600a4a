"""Quantize to GGML's K formats: super-blocks of 256 weights with quantized scales.

Scales are searched instead of taken from the extremes: several step sizes are tried, each followed by a weighted least
squares fit of scale (and minimum) to the resulting levels, and the one of least weighted error is kept. Then the scales
of a super-block are quantized and the levels recomputed. The rules and constants are those of the public GGML format.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from smelt.export.gguf_blocks import half, nibbles
from smelt.models.gguf.blocks import Bytes, Floats

SUPER = 256
_AT_ONCE = 1024  # super-blocks; the temporary arrays then stay in cache


def round_q4_k(blocks: Floats) -> Bytes:  # [super-blocks, 256] -> [super-blocks, 144]
    """Quantize to `d * scale * level - dmin * minimum`: eight groups of 32, 6-bit scales and minima."""
    return _in_pieces(blocks, _q4_k)


def round_q6_k(blocks: Floats) -> Bytes:  # [super-blocks, 256] -> [super-blocks, 210]
    """Quantize to `d * scale * level`: sixteen groups of 16, 8-bit scales, levels from -32 to 31."""
    return _in_pieces(blocks, _q6_k)


def _in_pieces(blocks: Floats, encode: Callable[[Floats], Bytes]) -> Bytes:
    starts = range(0, len(blocks), _AT_ONCE)
    return np.concatenate([encode(blocks[start : start + _AT_ONCE]) for start in starts])


def _q4_k(blocks: Floats) -> Bytes:
    x = blocks.reshape(-1, 8, 32)
    scale, low = _searched_range(x)
    d, scales = _few_bits(scale, 63)
    d_low, lows = _few_bits(low, 63)
    step = (_as_half(d) * scales)[..., None]  # [super-blocks, 8, 1]
    shift = (_as_half(d_low) * lows)[..., None]
    levels = np.clip(np.rint(_over(x + shift, step)), 0, 15).astype(np.uint8)
    packed = nibbles(levels.reshape(-1, 4, 64)).reshape(-1, 128)
    return np.concatenate([half(d[:, 0]), half(d_low[:, 0]), _six_bits(scales, lows), packed], axis=1)


def _searched_range(x: Floats) -> tuple[Floats, Floats]:
    """Return scale and negated minimum of each group [..., 32], both at least zero: [..., groups] each."""
    weight = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    low, high = np.minimum(x.min(-1, keepdims=True), 0), x.max(-1, keepdims=True)
    span = high - low
    best_scale, best_low = np.maximum(span / 15, 0), low
    best_error = _error(x, weight, np.clip(np.rint(_over(x - low, best_scale)), 0, 15), best_scale, best_low)
    total, total_x = weight.sum(-1, keepdims=True), _sum(weight, x)
    for attempt in range(21):
        levels = np.clip(np.rint((x - low) * _over(np.float32(14 + 0.1 * attempt), span)), 0, 15)
        first, second, cross = _sum(weight, levels), _sum(weight, levels, levels), _sum(weight, levels, x)
        determinant = total * second - first**2
        scale = _over(total * cross - total_x * first, determinant)
        shift = _over(second * total_x - first * cross, determinant)
        scale = np.where(shift > 0, _over(cross, second), scale)  # the minimum is not above zero
        shift = np.minimum(shift, 0)
        error = _error(x, weight, levels, scale, shift)
        better = (error < best_error) & (determinant > 0)
        best_scale, best_low = np.where(better, scale, best_scale), np.where(better, shift, best_low)
        best_error = np.where(better, error, best_error)
    return best_scale[..., 0].astype(np.float32), -best_low[..., 0].astype(np.float32)


def _error(x: Floats, weight: Floats, levels: Floats, scale: Floats, low: Floats) -> Floats:
    difference = scale * levels + (low - x)
    return _sum(weight, difference, difference)


def _sum(*factors: Floats) -> Floats:  # [..., group] each -> [..., 1]
    """Sum the product of the factors over a group."""
    letters = ",".join(["...i"] * len(factors))
    total: Floats = np.einsum(f"{letters}->...", *factors)
    return total[..., None]


def _few_bits(values: Floats, top: int) -> tuple[Floats, Floats]:
    """Quantize non-negative values [..., groups] to one scale times integers up to `top`."""
    largest = values.max(-1, keepdims=True)
    levels = np.minimum(np.rint(values * _over(np.float32(top), largest)), top)
    return (largest / np.float32(top)).astype(np.float32), levels.astype(np.float32)


def _six_bits(scales: Floats, lows: Floats) -> Bytes:  # two of [super-blocks, 8] -> [super-blocks, 12]
    """Pack 6-bit scales and minima: the first four of each in the low six bits of bytes 0-7; of the last four, the low
    four bits in bytes 8-11 and the upper two in the free bits of bytes 0-7."""
    s, m = scales.astype(np.uint8), lows.astype(np.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4 << 6)
    second = m[:, :4] | (m[:, 4:] >> 4 << 6)
    third = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


def _q6_k(blocks: Floats) -> Bytes:
    x = blocks.reshape(-1, 16, 16)
    scale = _searched_scale(x)  # [super-blocks, 16], with signs
    largest = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    d = largest / np.float32(-128)
    scales = np.clip(np.rint(_over(scale, d)), -128, 127)
    step = (_as_half(d) * scales)[..., None].astype(np.float32)
    levels = (np.clip(np.rint(_over(x, step)), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = nibbles((levels & np.uint8(15)).reshape(-1, 2, 128)).reshape(-1, 128)
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(levels >> 4 << shift, axis=2).reshape(-1, 64)
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), half(d[:, 0])], axis=1)


def _searched_scale(x: Floats) -> Floats:
    """Return the best scale of each group [..., 16] for levels from -32 to 31, errors weighted by the squared weight.
    Its sign maps the weight of largest magnitude to the lowest level."""
    weight = x * x
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    best, gain = np.zeros_like(largest), np.zeros_like(largest)
    for attempt in (0, *range(-9, 0), *range(1, 10)):
        levels = np.clip(np.rint(x * _over(np.float32(-(32 + 0.1 * attempt)), largest)), -32, 31)
        cross, second = _sum(weight, levels, x), _sum(weight, levels, levels)
        removed = _over(cross**2, second)  # of the squared error, by the best scale for these levels
        better = removed > gain
        best, gain = np.where(better, _over(cross, second), best), np.where(better, removed, gain)
    return best[..., 0].astype(np.float32)


def _as_half(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _over(top: NDArray[np.float32] | np.float32, bottom: Floats) -> Floats:
    """Divide, with zero where the quotient is not finite."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient: Floats = np.asarray(top / bottom, dtype=np.float32)
    quotient[~np.isfinite(quotient)] = 0
    return quotient
