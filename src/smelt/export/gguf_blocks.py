"""Write GGML blocks of 32 weights: pack levels and scales, or quantize weights by the public rules.

The inverse of `models/gguf/blocks.py`, whose layouts it follows. Blocks are [blocks, 32]; elements i and i + 16 share a
byte. `lay_*` packs levels and scales unchanged; `round_*` first computes them from the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from smelt.models.gguf.blocks import Bytes, Floats

Levels = NDArray[np.int16]
BLOCK = 32


def half(values: Floats) -> Bytes:  # [blocks] -> [blocks, 2]
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8).reshape(-1, 2)


def nibbles(levels: NDArray[np.uint8]) -> Bytes:  # [..., 2 n] -> [..., n]
    """Pack the first half of the levels into the low bits, the second into the high bits."""
    middle = levels.shape[-1] // 2
    return levels[..., :middle] | levels[..., middle:] << np.uint8(4)


def lay_q4_0(levels: Levels, scale: Floats) -> Bytes:
    """Pack levels from -8 to 7 with a scale."""
    return np.concatenate([half(scale), nibbles((levels + 8).astype(np.uint8))], axis=1)


def lay_q5_0(levels: Levels, scale: Floats) -> Bytes:
    """Pack levels from -16 to 15 with a scale. The fifth bits are in four separate bytes."""
    raised = (levels + 16).astype(np.uint8)
    fifth = np.packbits(raised >> np.uint8(4), axis=1, bitorder="little")
    return np.concatenate([half(scale), fifth, nibbles(raised & np.uint8(15))], axis=1)


def lay_q8_0(levels: Levels, scale: Floats) -> Bytes:
    """Pack levels from -128 to 127 with a scale."""
    return np.concatenate([half(scale), levels.astype(np.int8).view(np.uint8)], axis=1)


def lay_q4_1(levels: Levels, scale: Floats, minimum: Floats) -> Bytes:
    """Pack levels from 0 to 15 with a scale and a minimum."""
    return np.concatenate([half(scale), half(minimum), nibbles(levels.astype(np.uint8))], axis=1)


def round_q4_0(blocks: Floats) -> Bytes:
    return _round_signed(blocks, 8, lay_q4_0)


def round_q5_0(blocks: Floats) -> Bytes:
    return _round_signed(blocks, 16, lay_q5_0)


def _round_signed(blocks: Floats, half_range: int, lay: Callable[[Levels, Floats], Bytes]) -> Bytes:
    """Map the weight of largest magnitude to the lowest level, as there is one more level below zero than above; the
    scale therefore has the opposite sign of that weight."""
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)  # [blocks, 1], with its sign
    scale = largest / np.float32(-half_range)
    steps = blocks * _inverse(scale) + np.float32(half_range + 0.5)
    levels = np.clip(np.trunc(steps), 0, 2 * half_range - 1).astype(np.int16) - half_range
    return lay(levels.astype(np.int16), scale[:, 0])


def round_q4_1(blocks: Floats) -> Bytes:
    low = blocks.min(1, keepdims=True)
    scale = (blocks.max(1, keepdims=True) - low) / np.float32(15)
    levels = np.clip(np.trunc((blocks - low) * _inverse(scale) + np.float32(0.5)), 0, 15)
    return lay_q4_1(levels.astype(np.int16), scale[:, 0], low[:, 0])


def round_q8_0(blocks: Floats) -> Bytes:
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    steps = blocks * _inverse(scale)
    levels = np.trunc(steps + np.copysign(np.float32(0.5), steps))  # round half away from zero
    return lay_q8_0(levels.astype(np.int16), scale[:, 0])


def _inverse(scale: Floats) -> Floats:
    with np.errstate(divide="ignore", over="ignore"):
        inverse: Floats = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    return inverse
