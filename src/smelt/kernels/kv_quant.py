"""Quantized KV cache: the key or value of one head and token is a row of bytes, its codes and then its parameters.

A value is scale * (code - zero). Rows are opaque to whatever keeps, drops, copies or fetches pages: only writers
quantize, and attention reads codes.

    int8  one code per byte, -127..127; scale in float32
    fp8   one E4M3 code per byte; scale in float32
    int4  two codes per byte, the second half a padded row later; scale in float16 and zero point in int16
    int3  32 codes in three words of 32 bits; scale in float16 and zero point in int16

Both halves of a word of int3 have five codes each, bits 0 to 14; the three top bits of the same half of three words are
one more. Counted from low to high bits and from word to word, those of low halves are the codes 0, 2, ..., 30 of the
32, those of high halves 1, 3, ..., 31. A kernel thus reads a pair of neighboring codes by one shift and one mask.

K and V may be rotated by a Hadamard matrix before they are quantized: channels that are large in every token no
longer take up the full range (QuaRot, Ashkboos et al., 2024). Queries are rotated with the keys, which leaves their
products unchanged; attention computes a rotated output from rotated values, and rotates it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.kernels.hadamard import hadamard_transform
from smelt.numerics.integer import quantize_int8

INT8, FP8, INT4, INT3 = "int8", "fp8", "int4", "int3"
KV_QUANT_DTYPES = (INT8, FP8, INT4, INT3)
QPARAM_BYTES = 4
INT3_GROUP = 32  # codes in three words
LARGEST_CODE = {INT4: 15, INT3: 7}  # of the formats with zero points
# Of the range of a row: codes are the centers of 16 or 8 equal parts of it, not so many points from end to end.
CLIP = {INT4: 15 / 16, INT3: 7 / 8}
_FP8_MAX = 448.0
_MIN_SCALE = 1e-30


@dataclass(frozen=True)
class KVQuantFormat:
    """A row format for heads of `head_dim` values."""

    name: str
    head_dim: int
    hadamard: bool = False  # rotate Q, K and V by a Hadamard matrix

    dtype: ClassVar[torch.dtype] = torch.uint8

    def __post_init__(self) -> None:
        if self.name not in KV_QUANT_DTYPES:
            raise ValueError(f"The KV cache cannot be stored in {self.name!r}; use {', '.join(KV_QUANT_DTYPES)}.")

    @classmethod
    def for_head_dim(cls, name: str, head_dim: int) -> KVQuantFormat:
        """Return the format used for serving: int4 and int3 are rotated where head_dim is a power of two."""
        return cls(name, head_dim, hadamard=name in LARGEST_CODE and head_dim & (head_dim - 1) == 0)

    @property
    def half_dim(self) -> int:
        """Half of head_dim padded to a power of two: the distance of the two codes in one byte of int4."""
        return 1 << max(self.head_dim - 1, 1).bit_length() - 1

    @property
    def code_bytes(self) -> int:
        if self.name == INT3:
            return -(-self.head_dim // INT3_GROUP) * 12
        return self.half_dim if self.name == INT4 else self.head_dim

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, a multiple of 4."""
        return -(-self.code_bytes // QPARAM_BYTES) * QPARAM_BYTES + QPARAM_BYTES

    @property
    def is_simd_aligned(self) -> bool:
        """Whether 16 consecutive codes lie side by side, as the compiled CPU kernel reads them."""
        return self.name != INT4 or self.half_dim % 16 == 0

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries, keys or values [..., head_dim]."""
        return hadamard_transform(x) if self.hadamard else x

    def unrotate(self, x: Tensor) -> Tensor:
        """Undo `rotate`, also for the output of attention."""
        return hadamard_transform(x, inverse=True) if self.hadamard else x

    def dequantize_unrotated(self, rows: Tensor, dtype: torch.dtype) -> Tensor:  # [..., row_bytes] -> [..., head_dim]
        """Dequantize and rotate back: keys after RoPE, or values, as the network computed them."""
        return self.unrotate(self.dequantize(rows, dtype))

    def quantize(self, x: Tensor) -> Tensor:  # [..., head_dim] -> [..., row_bytes], uint8
        """Quantize keys or values, already rotated."""
        x = x.float()
        if self.name in LARGEST_CODE:
            codes, qparams = self._quantize_asymmetric(x)
        elif self.name == INT8:
            codes, qparams = quantize_int8(x, min_scale=_MIN_SCALE)
            codes, qparams = codes.view(torch.uint8), qparams.clamp(min=_MIN_SCALE)
        else:
            qparams = (x.abs().amax(dim=-1, keepdim=True) / _FP8_MAX).clamp(min=_MIN_SCALE)
            codes = (x / qparams).to(torch.float8_e4m3fn).view(torch.uint8)
        padding = codes.new_zeros(*codes.shape[:-1], self.row_bytes - QPARAM_BYTES - self.code_bytes)
        return torch.cat((codes, padding, qparams.contiguous().view(torch.uint8)), dim=-1)

    def _quantize_asymmetric(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return packed codes in bytes, and scale and zero point in the two halves of a word."""
        largest, clip = LARGEST_CODE[self.name], CLIP[self.name]
        low, high = x.amin(dim=-1, keepdim=True).clamp(max=0), x.amax(dim=-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / (largest + 1)).clamp(min=1e-7).half()
        zero = (-low * clip / scale.float()).round().clamp(0, largest)
        codes = ((x / scale.float()).round() + zero).clamp(0, largest).int()
        packed = _pack_int3(codes) if self.name == INT3 else _pack_int4(codes, self.half_dim)
        return packed, torch.cat((scale.view(torch.int16), zero.to(torch.int16)), dim=-1)

    def dequantize(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:  # -> [..., head_dim]
        """Dequantize rows [..., row_bytes]."""
        codes, qparams = rows[..., : self.code_bytes].contiguous(), rows[..., -QPARAM_BYTES:].contiguous()
        if self.name in LARGEST_CODE:
            scale, zero = qparams.view(torch.float16)[..., :1].float(), qparams.view(torch.int16)[..., 1:].float()
            unpacked = _unpack_int3(codes) if self.name == INT3 else torch.cat((codes & 15, codes >> 4), dim=-1)
            return ((unpacked[..., : self.head_dim].float() - zero) * scale).to(dtype)
        values = codes.view(torch.int8 if self.name == INT8 else torch.float8_e4m3fn)
        return (values.float() * qparams.view(torch.float32)).to(dtype)


def _pack_int4(codes: Tensor, half_dim: int) -> Tensor:  # [..., head_dim], int32 -> [..., half_dim], uint8
    codes = torch.nn.functional.pad(codes, (0, 2 * half_dim - codes.shape[-1]))
    return (codes[..., :half_dim] | codes[..., half_dim:] << 4).to(torch.uint8)


def _pack_int3(codes: Tensor) -> Tensor:  # [..., head_dim], int32 -> [..., bytes], uint8
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % INT3_GROUP))
    pairs = codes.unflatten(-1, (-1, INT3_GROUP // 2, 2))  # [..., groups, slots, halves of a word]
    shifts = torch.arange(0, 15, 3, device=codes.device)[:, None]
    words = [
        (pairs[..., 5 * word : 5 * word + 5, :] << shifts).sum(-2) | (pairs[..., 15, :] >> word & 1) << 15
        for word in range(3)
    ]
    return torch.stack(words, dim=-2).to(torch.int16).flatten(-3).view(torch.uint8)


def _unpack_int3(packed: Tensor) -> Tensor:  # [..., bytes], uint8 -> [..., 32 * groups], int32
    words = packed.view(torch.int16).int().unflatten(-1, (-1, 3, 2))  # [..., groups, words, halves]
    shifts = torch.arange(0, 15, 3, device=packed.device)[:, None]
    slots = (words.unsqueeze(-2) >> shifts & 7).flatten(-3, -2)  # [..., groups, 15, halves]
    bits = torch.arange(3, device=packed.device)[:, None]
    last = ((words >> 15 & 1) << bits).sum(-2, keepdim=True, dtype=torch.int32)
    return torch.cat((slots, last), dim=-2).flatten(-3)


def quantize_qkv(
    kv_quant: KVQuantFormat | None, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as pages of this format need them: rotated queries, quantized rows."""
    if kv_quant is None:
        return queries, keys, values
    key_rows, value_rows = (kv_quant.quantize(kv_quant.rotate(x)) for x in (keys, values))
    return kv_quant.rotate(queries), key_rows, value_rows


def row_layout(kv_quant: KVQuantFormat | None, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the length of the last axis of pages and their dtype, for a network of `dtype`."""
    return (head_dim, dtype) if kv_quant is None else (kv_quant.row_bytes, kv_quant.dtype)
