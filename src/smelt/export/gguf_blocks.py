"""Write GGML blocks: pack codes and scales unchanged, convert packed layers exactly, or quantize weights.

The inverse of `models/gguf/blocks.py`, whose layouts it follows. `pack_*` stores codes and scales as they are,
`quantize_*` first computes them from the weights by GGML's public rules. A layer that is already quantized is converted
without rounding again, or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smelt.errors import FormatError
from smelt.models.gguf.blocks import Bytes, Floats
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.catalog import format_name
from smelt.numerics.format import Format, QuantizedTensor
from smelt.numerics.integer import DenormalInteger, Integer
from smelt.numerics.scaled import Scaled, Ternary

Levels = NDArray[np.int16]
BLOCK_SIZE = 32
_SUPER_BLOCKS_PER_CHUNK = 1024  # the temporary arrays then stay in cache
_MAX_DENOMINATOR = 8  # element values are tried as multiples of 1/8 at most


# --- blocks of 32 weights: [blocks, 32], elements i and i + 16 share a byte -------------------------------------------


def _float16_bytes(values: Floats) -> Bytes:  # [blocks] -> [blocks, 2]
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8).reshape(-1, 2)


def _pack_nibbles(levels: NDArray[np.uint8]) -> Bytes:  # [..., 2 n] -> [..., n]
    """Pack the first half of the levels into the low bits, the second into the high bits."""
    middle = levels.shape[-1] // 2
    return levels[..., :middle] | levels[..., middle:] << np.uint8(4)


def pack_q4_0(levels: Levels, scale: Floats) -> Bytes:
    """Pack levels from -8 to 7 with a scale."""
    return np.concatenate([_float16_bytes(scale), _pack_nibbles((levels + 8).astype(np.uint8))], axis=1)


def pack_q5_0(levels: Levels, scale: Floats) -> Bytes:
    """Pack levels from -16 to 15 with a scale. The fifth bits are in four separate bytes."""
    raised = (levels + 16).astype(np.uint8)
    fifth = np.packbits(raised >> np.uint8(4), axis=1, bitorder="little")
    return np.concatenate([_float16_bytes(scale), fifth, _pack_nibbles(raised & np.uint8(15))], axis=1)


def pack_q8_0(levels: Levels, scale: Floats) -> Bytes:
    """Pack levels from -128 to 127 with a scale."""
    return np.concatenate([_float16_bytes(scale), levels.astype(np.int8).view(np.uint8)], axis=1)


def pack_q4_1(levels: Levels, scale: Floats, minimum: Floats) -> Bytes:
    """Pack levels from 0 to 15 with a scale and a minimum."""
    return np.concatenate(
        [_float16_bytes(scale), _float16_bytes(minimum), _pack_nibbles(levels.astype(np.uint8))], axis=1
    )


def quantize_q4_0(blocks: Floats) -> Bytes:
    return _quantize_signed(blocks, 8, pack_q4_0)


def quantize_q5_0(blocks: Floats) -> Bytes:
    return _quantize_signed(blocks, 16, pack_q5_0)


def _quantize_signed(blocks: Floats, half_range: int, pack: Callable[[Levels, Floats], Bytes]) -> Bytes:
    """Map the weight of largest magnitude to the lowest level, as there is one more level below zero than above; the
    scale therefore has the opposite sign of that weight."""
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)  # [blocks, 1], with its sign
    scale = largest / np.float32(-half_range)
    steps = blocks * _inverse(scale) + np.float32(half_range + 0.5)
    levels = np.clip(np.trunc(steps), 0, 2 * half_range - 1).astype(np.int16) - half_range
    return pack(levels.astype(np.int16), scale[:, 0])


def quantize_q4_1(blocks: Floats) -> Bytes:
    low = blocks.min(1, keepdims=True)
    scale = (blocks.max(1, keepdims=True) - low) / np.float32(15)
    levels = np.clip(np.trunc((blocks - low) * _inverse(scale) + np.float32(0.5)), 0, 15)
    return pack_q4_1(levels.astype(np.int16), scale[:, 0], low[:, 0])


def quantize_q8_0(blocks: Floats) -> Bytes:
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    steps = blocks * _inverse(scale)
    levels = np.trunc(steps + np.copysign(np.float32(0.5), steps))  # round half away from zero
    return pack_q8_0(levels.astype(np.int16), scale[:, 0])


def _inverse(scale: Floats) -> Floats:
    with np.errstate(divide="ignore", over="ignore"):
        inverse: Floats = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    return inverse


# --- K-quants: super-blocks of 256 weights with quantized scales ------------------------------------------------------
#
# Scales are searched instead of taken from the extremes: several step sizes are tried, each followed by a weighted
# least-squares fit of scale (and minimum) to the resulting levels, and the one of least weighted error is kept. Then
# the scales of a super-block are quantized and the levels recomputed. Rules and constants are those of the GGML format.


def quantize_q4_k(blocks: Floats) -> Bytes:  # [super-blocks, 256] -> [super-blocks, 144]
    """Quantize to `d * scale * level - dmin * minimum`: eight groups of 32, 6-bit scales and minima."""
    return _quantize_in_chunks(blocks, _quantize_q4_k)


def quantize_q6_k(blocks: Floats) -> Bytes:  # [super-blocks, 256] -> [super-blocks, 210]
    """Quantize to `d * scale * level`: sixteen groups of 16, 8-bit scales, levels from -32 to 31."""
    return _quantize_in_chunks(blocks, _quantize_q6_k)


def _quantize_in_chunks(blocks: Floats, encode: Callable[[Floats], Bytes]) -> Bytes:
    starts = range(0, len(blocks), _SUPER_BLOCKS_PER_CHUNK)
    return np.concatenate([encode(blocks[start : start + _SUPER_BLOCKS_PER_CHUNK]) for start in starts])


def _quantize_q4_k(blocks: Floats) -> Bytes:
    x = blocks.reshape(-1, 8, 32)
    scale, low = _search_scale_and_min(x)
    d, scales = _quantize_scales(scale, 63)
    d_low, minima = _quantize_scales(low, 63)
    step = (_round_to_float16(d) * scales)[..., None]  # [super-blocks, 8, 1]
    shift = (_round_to_float16(d_low) * minima)[..., None]
    levels = np.clip(np.rint(_safe_divide(x + shift, step)), 0, 15).astype(np.uint8)
    packed = _pack_nibbles(levels.reshape(-1, 4, 64)).reshape(-1, 128)
    return np.concatenate(
        [_float16_bytes(d[:, 0]), _float16_bytes(d_low[:, 0]), _pack_6bit_scales(scales, minima), packed], axis=1
    )


def _search_scale_and_min(x: Floats) -> tuple[Floats, Floats]:
    """Return scale and negated minimum of each group [..., 32], both at least zero: [..., groups] each."""
    weight = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    low, high = np.minimum(x.min(-1, keepdims=True), 0), x.max(-1, keepdims=True)
    span = high - low
    best_scale, best_low = np.maximum(span / 15, 0), low
    best_error = _weighted_error(
        x, weight, np.clip(np.rint(_safe_divide(x - low, best_scale)), 0, 15), best_scale, best_low
    )
    total, total_x = weight.sum(-1, keepdims=True), _sum_of_products(weight, x)
    for attempt in range(21):
        levels = np.clip(np.rint((x - low) * _safe_divide(np.float32(14 + 0.1 * attempt), span)), 0, 15)
        first, second, cross = (
            _sum_of_products(weight, levels),
            _sum_of_products(weight, levels, levels),
            _sum_of_products(weight, levels, x),
        )
        determinant = total * second - first**2
        scale = _safe_divide(total * cross - total_x * first, determinant)
        shift = _safe_divide(second * total_x - first * cross, determinant)
        scale = np.where(shift > 0, _safe_divide(cross, second), scale)  # the minimum is not above zero
        shift = np.minimum(shift, 0)
        error = _weighted_error(x, weight, levels, scale, shift)
        better = (error < best_error) & (determinant > 0)
        best_scale, best_low = np.where(better, scale, best_scale), np.where(better, shift, best_low)
        best_error = np.where(better, error, best_error)
    return best_scale[..., 0].astype(np.float32), -best_low[..., 0].astype(np.float32)


def _weighted_error(x: Floats, weight: Floats, levels: Floats, scale: Floats, low: Floats) -> Floats:
    difference = scale * levels + (low - x)
    return _sum_of_products(weight, difference, difference)


def _sum_of_products(*factors: Floats) -> Floats:  # [..., group] each -> [..., 1]
    """Sum the product of the factors over a group."""
    letters = ",".join(["...i"] * len(factors))
    total: Floats = np.einsum(f"{letters}->...", *factors)
    return total[..., None]


def _quantize_scales(values: Floats, max_level: int) -> tuple[Floats, Floats]:
    """Quantize non-negative values [..., groups] to one scale times integers up to `max_level`."""
    largest = values.max(-1, keepdims=True)
    levels = np.minimum(np.rint(values * _safe_divide(np.float32(max_level), largest)), max_level)
    return (largest / np.float32(max_level)).astype(np.float32), levels.astype(np.float32)


def _pack_6bit_scales(scales: Floats, minima: Floats) -> Bytes:  # two of [super-blocks, 8] -> [super-blocks, 12]
    """Pack 6-bit scales and minima: the first four of each in the low six bits of bytes 0-7; of the last four, the low
    four bits in bytes 8-11 and the upper two in the free bits of bytes 0-7."""
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4 << 6)
    second = m[:, :4] | (m[:, 4:] >> 4 << 6)
    third = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=1)


def _quantize_q6_k(blocks: Floats) -> Bytes:
    x = blocks.reshape(-1, 16, 16)
    scale = _search_scale(x)  # [super-blocks, 16], with signs
    largest = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    d = largest / np.float32(-128)
    scales = np.clip(np.rint(_safe_divide(scale, d)), -128, 127)
    step = (_round_to_float16(d) * scales)[..., None].astype(np.float32)
    levels = (np.clip(np.rint(_safe_divide(x, step)), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = _pack_nibbles((levels & np.uint8(15)).reshape(-1, 2, 128)).reshape(-1, 128)
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(levels >> 4 << shift, axis=2).reshape(-1, 64)
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), _float16_bytes(d[:, 0])], axis=1)


def _search_scale(x: Floats) -> Floats:
    """Return the best scale of each group [..., 16] for levels from -32 to 31, errors weighted by the squared weight.
    Its sign maps the weight of largest magnitude to the lowest level."""
    weight = x * x
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    best, gain = np.zeros_like(largest), np.zeros_like(largest)
    for attempt in (0, *range(-9, 0), *range(1, 10)):
        levels = np.clip(np.rint(x * _safe_divide(np.float32(-(32 + 0.1 * attempt)), largest)), -32, 31)
        cross, second = _sum_of_products(weight, levels, x), _sum_of_products(weight, levels, levels)
        removed = _safe_divide(cross**2, second)  # of the squared error, by the best scale for these levels
        better = removed > gain
        best, gain = np.where(better, _safe_divide(cross, second), best), np.where(better, removed, gain)
    return best[..., 0].astype(np.float32)


def _round_to_float16(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


def _safe_divide(numerator: NDArray[np.float32] | np.float32, denominator: Floats) -> Floats:
    """Divide, with zero where the quotient is not finite."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quotient: Floats = np.asarray(numerator / denominator, dtype=np.float32)
    quotient[~np.isfinite(quotient)] = 0
    return quotient


# --- packed layers, exactly: integer levels times a float16 scale -----------------------------------------------------
#
# A group of any multiple of 32 becomes blocks of 32 with the same scale. Levels from -8 to 7 are Q4_0, to 15 Q5_0, to
# 127 Q8_0. Weights with zero points are Q4_1 if the minimum is a float16 number; otherwise their levels are signed and
# need the next larger type: more bits, the same weights.

_PACK_SIGNED = {"Q4_0": (8, pack_q4_0), "Q5_0": (16, pack_q5_0), "Q8_0": (128, pack_q8_0)}


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix as integer levels with one scale per block of 32, and the GGML type that represents it."""

    ggml_type: str
    levels: Levels  # [rows, columns]
    scale: Floats  # [rows, blocks of a row]
    minimum: Floats | None = None  # of Q4_1, [rows, blocks of a row]

    def to_bytes(self, rows: Tensor | None = None) -> Bytes:
        """Return the bytes, with rows in the given order if any."""
        order = slice(None) if rows is None else rows.numpy()
        levels, scale = self.levels[order].reshape(-1, BLOCK_SIZE), self.scale[order].reshape(-1)
        if self.minimum is not None:
            return pack_q4_1(levels, scale, self.minimum[order].reshape(-1))
        return _PACK_SIGNED[self.ggml_type][1](levels, scale)


def to_exact_blocks(path: str, layer: QuantizedLinear) -> BlockMatrix:
    """Return the blocks that represent a layer exactly, or raise FormatError with the reason."""
    number_format = layer.scheme.weight
    stored = {name: tensor.cpu() for name, tensor in layer.packed.tensors.items()}
    quantized = QuantizedTensor.from_packed(number_format, stored, layer.in_features)
    size = check_format(path, layer)
    if has_float_zero_points(layer):
        return _q4_1_from_gguf(path, quantized, size)
    levels, scale = _integer_levels(path, quantized)
    # [rows, blocks of a row]
    scale_per_block = scale.expand(layer.out_features, -1).repeat_interleave(size // BLOCK_SIZE, dim=1)
    if not torch.equal(scale_per_block.half().float(), scale_per_block):
        raise FormatError(
            f"the scales of {path} are not float16 numbers, as GGUF needs; quantize with scales in float16 "
            f"(format {format_name(number_format).partition('@')[0]}@float16)."
        )
    lowest, highest = int(levels.min()), int(levels.max())
    shifted = _q4_1_if_exact(quantized, scale_per_block, size)
    if shifted is not None and (lowest < -8 or highest > 7):
        return shifted
    for ggml_type, (limit, _) in _PACK_SIGNED.items():
        if -limit <= lowest and highest < limit:
            return BlockMatrix(ggml_type, levels.to(torch.int16).numpy(), scale_per_block.numpy())
    raise FormatError(
        f"{path} has {number_format.bits} bits and zero points, which exceeds Q8_0; quantize it symmetrically."
    )


def check_format(path: str, layer: QuantizedLinear) -> int:
    """Return the group size of a layer, or raise FormatError if no block of GGUF has its format, whatever its codes."""
    size = layer.scheme.weight.effective_group_size(layer.in_features)
    if size % BLOCK_SIZE or layer.in_features % size:
        raise FormatError(
            f"{path} has groups of {size}, and a block of GGUF has {BLOCK_SIZE} weights; quantize with a group_size of "
            f"{BLOCK_SIZE} or a multiple of it, which must divide the {layer.in_features} inputs."
        )
    number_format = layer.scheme.weight
    if not isinstance(number_format, Integer | DenormalInteger | Scaled | Ternary):
        raise _unsupported(path, number_format)
    if type(number_format) in (Scaled, Ternary) and not _common_denominator(number_format):  # type: ignore[arg-type]
        raise _unsupported(path, number_format)
    return size


def has_float_zero_points(layer: QuantizedLinear) -> bool:
    """Return whether the zero points are float32, converted from the minima of a GGUF file."""
    number_format = layer.scheme.weight
    return type(number_format) is Integer and number_format.zero_dtype == "float32"


def _q4_1_from_gguf(path: str, quantized: QuantizedTensor, size: int) -> BlockMatrix:
    """Convert codes from a GGUF file back to Q4_1, with zero points that come from float16 minima."""
    scale, zero = quantized.qparams.scale, quantized.qparams.zero
    assert zero is not None
    minimum = (-zero * scale).half().float()
    if (
        quantized.format.bits > 4
        or not torch.equal(scale.half().float(), scale)
        or not torch.equal(-minimum / scale, zero)
    ):
        raise FormatError(
            f"{path} is in {format_name(quantized.format)}, and Q4_1 has four bits with minima in float16."
        )
    scale, minimum = (tensor.squeeze(-1).repeat_interleave(size // BLOCK_SIZE, dim=1) for tensor in (scale, minimum))
    return BlockMatrix("Q4_1", quantized.codes.to(torch.int16).numpy(), scale.numpy(), minimum.numpy())


def _integer_levels(path: str, quantized: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return integer levels [rows, columns] and the scale between them [rows or 1, groups]."""
    number_format, qparams = quantized.format, quantized.qparams
    columns, size = quantized.codes.shape[-1], quantized.format.effective_group_size(quantized.codes.shape[-1])
    codes = quantized.codes.unflatten(-1, (-1, size))
    if isinstance(number_format, DenormalInteger):
        levels, scale = number_format.doubled(codes, qparams), qparams.scale / 2
    elif isinstance(number_format, Integer) and number_format.zero_dtype == "code":
        levels, scale = codes.float() - number_format.zero_point(qparams), qparams.scale
    elif type(number_format) in (Scaled, Ternary) and (denominator := _common_denominator(number_format)):  # type: ignore[arg-type]
        levels, scale = number_format.elements.decode(codes) * denominator, qparams.scale / denominator  # type: ignore[attr-defined]
    else:
        raise _unsupported(path, number_format)
    return levels.flatten(-2)[..., :columns], scale.squeeze(-1)


def _unsupported(path: str, number_format: Format) -> FormatError:
    return FormatError(
        f"{path} is in {format_name(number_format)}, whose values are not integer multiples of a float16; GGUF "
        "supports int2 to int8, dint, ternary and mxfp4, or export the unquantized model with --type."
    )


def _common_denominator(number_format: Scaled) -> int:
    """Return the smallest factor that makes every element value an integer; 0 if none is small enough."""
    values = torch.tensor([value for value in number_format.elements.values if value == value])
    for denominator in (1, 2, 4, _MAX_DENOMINATOR):
        scaled = values * denominator
        if bool((scaled == scaled.round()).all()):
            return denominator if float(scaled.abs().max()) <= 127 else 0
    return 0


def _q4_1_if_exact(quantized: QuantizedTensor, scale_per_block: Tensor, size: int) -> BlockMatrix | None:
    """Return Q4_1 blocks if the codes have at most four bits and every minimum is exactly a float16; else None."""
    number_format, qparams = quantized.format, quantized.qparams
    if type(number_format) is not Integer or number_format.symmetric or number_format.bits > 4 or qparams.zero is None:
        return None
    zero = qparams.zero.squeeze(-1).expand(scale_per_block.shape[0], -1).repeat_interleave(size // BLOCK_SIZE, dim=1)
    minimum = -zero * scale_per_block
    if not torch.equal(minimum.half().float(), minimum):
        return None
    return BlockMatrix("Q4_1", quantized.codes.to(torch.int16).numpy(), scale_per_block.numpy(), minimum.numpy())
