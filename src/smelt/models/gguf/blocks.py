"""Decode GGML's block formats in NumPy: packed bytes in, float32 out.

A quantized row is a sequence of blocks; a block holds 32 (in the K formats 256) weights that share scales. Each reader
takes blocks as bytes, [blocks, bytes per block]. Readers of float formats return weights, [blocks, weights per block];
those of quantized formats return `Levels`, which are dequantized or converted to packed layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

# Decoding in chunks keeps the temporary arrays small and in cache.
_WEIGHTS_PER_CHUNK = 2**20


@dataclass(frozen=True)
class Levels:
    """The content of quantized blocks: a weight is `scale * (code - middle)` or `scale * code + minimum`."""

    codes: Bytes  # [blocks, groups per block, weights per group]
    scale: Floats  # [blocks, groups per block, 1]
    middle: int = 0
    minimum: Floats | None = None  # same shape as the scale

    def values(self) -> Floats:
        codes = self.codes.astype(np.float32)
        weights = self.scale * (codes - self.middle) if self.minimum is None else self.scale * codes + self.minimum
        return weights.reshape(len(codes), -1)


@dataclass(frozen=True)
class BlockFormat:
    """A GGML tensor type: weights per block, bytes per block, and the reader."""

    name: str
    weights: int
    bytes: int
    read: Callable[[Bytes], Floats | Levels]
    bits: int = 0  # per code; 0 for float formats

    def decode(self, blocks: Bytes) -> Floats:
        content = self.read(blocks)
        return content.values() if isinstance(content, Levels) else content


def dequantize(data: Bytes, block_format: BlockFormat, shape: tuple[int, ...]) -> Floats:
    """Dequantize `data` to a float32 tensor of this shape; the size must match exactly."""
    blocks = data.reshape(-1, block_format.bytes)
    weights = np.empty((len(blocks), block_format.weights), dtype=np.float32)
    step = max(1, _WEIGHTS_PER_CHUNK // block_format.weights)
    for start in range(0, len(blocks), step):
        weights[start : start + step] = block_format.decode(np.ascontiguousarray(blocks[start : start + step]))
    return weights.reshape(shape)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32, copy=False)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    # bfloat16 is the upper half of a float32.
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _half(blocks: Bytes, start: int) -> Floats:
    """Read the float16 at byte `start` of each block, [blocks, 1]."""
    return _f16(np.ascontiguousarray(blocks[:, start : start + 2]))


def _nibbles(packed: Bytes) -> Bytes:
    """Unpack all low nibbles, then all high nibbles: [..., n] -> [..., 2 n]."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Unpack 32 bits, lowest first, each as 0 or 16: [blocks, 4] -> [blocks, 32]."""
    return np.unpackbits(packed, axis=-1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: Bytes) -> Levels:
    return _one_group(_nibbles(blocks[:, 2:]), _half(blocks, 0), 8)


def _q4_1(blocks: Bytes) -> Levels:
    return _one_group(_nibbles(blocks[:, 4:]), _half(blocks, 0), minimum=_half(blocks, 2))


def _q5_0(blocks: Bytes) -> Levels:
    return _one_group(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0), 16)


def _q5_1(blocks: Bytes) -> Levels:
    return _one_group(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), minimum=_half(blocks, 2))


def _q8_0(blocks: Bytes) -> Levels:
    return _one_group(blocks[:, 2:] ^ np.uint8(0x80), _half(blocks, 0), 128)  # signed to unsigned codes


def _one_group(codes: Bytes, scale: Floats, middle: int = 0, minimum: Floats | None = None) -> Levels:
    """Return blocks whose weights all share one scale and minimum."""
    return Levels(codes[:, None], scale[:, None], middle, None if minimum is None else minimum[:, None])


def _scales_and_minima(packed: Bytes) -> tuple[Floats, Floats]:
    """Unpack eight 6-bit scales and eight 6-bit minima: [blocks, 12] -> two arrays [blocks, 8, 1].

    The first four of each are in the low six bits of bytes 0-3 and 4-7. The other four have their low four bits in the
    nibbles of bytes 8-11 and their high two bits in the high bits of bytes 0-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | (second >> 6 << 4)], axis=-1)
    return scales[..., None].astype(np.float32), minima[..., None].astype(np.float32)


def _scaled_groups(blocks: Bytes, codes: Bytes) -> Levels:
    """Return the levels of Q4_K and Q5_K: eight groups of 32, each with a scale and a minimum."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    return Levels(codes, _half(blocks, 0)[..., None] * scales, minimum=-(_half(blocks, 2)[..., None] * minima))


def _q4_k(blocks: Bytes) -> Levels:
    return _scaled_groups(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Levels:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    group = np.arange(8, dtype=np.uint8)[:, None]
    fifth: Bytes = (blocks[:, None, 16:48] >> group) & np.uint8(1)  # bit g of byte l belongs to weight l of group g
    return _scaled_groups(blocks, low | fifth * np.uint8(16))


def _q6_k(blocks: Bytes) -> Levels:
    # Two halves of 128 weights: four runs of 32, with low nibbles in 64 bytes and the upper two bits in 32 bytes.
    low = _nibbles(blocks[:, 0:128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high: Bytes = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shift & np.uint8(3)) * np.uint8(16)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)  # one per 16 weights
    return Levels((low | high).reshape(-1, 16, 16), (_half(blocks, 208) * scales)[..., None], 32)


FORMATS = {
    0: BlockFormat("F32", 1, 4, _f32),
    1: BlockFormat("F16", 1, 2, _f16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0, 4),
    3: BlockFormat("Q4_1", 32, 20, _q4_1, 4),
    6: BlockFormat("Q5_0", 32, 22, _q5_0, 5),
    7: BlockFormat("Q5_1", 32, 24, _q5_1, 5),
    8: BlockFormat("Q8_0", 32, 34, _q8_0, 8),
    12: BlockFormat("Q4_K", 256, 144, _q4_k, 4),
    13: BlockFormat("Q5_K", 256, 176, _q5_k, 5),
    14: BlockFormat("Q6_K", 256, 210, _q6_k, 6),
    30: BlockFormat("BF16", 1, 2, _bf16),
}
