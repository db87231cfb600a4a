"""Quantized KV cache: the key or value of one head and token is a row of bytes, its codes and then its parameters.

A value is scale * (code - zero). Rows are opaque to whatever keeps, drops, copies or fetches pages: only writers
quantize, and attention reads codes.

    int8  one code per byte, -127..127; scale in float32
    fp8   one E4M3 code per byte; scale in float32
    int4  two codes per byte, the second half a padded row later; scale in float16 and zero point in int16

Keys may be rotated by a Hadamard matrix before they are quantized, and queries with them, which leaves their products
unchanged (QuaRot, Ashkboos et al., 2024): channels that are large in every key no longer take up the full range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.kernels.hadamard import hadamard_transform
from smelt.numerics.integer import quantize_int8

INT8, FP8, INT4 = "int8", "fp8", "int4"
KV_QUANT_DTYPES = (INT8, FP8, INT4)
QPARAM_BYTES = 4
_FP8_MAX = 448.0
_MIN_SCALE = 1e-30


@dataclass(frozen=True)
class KVQuantFormat:
    """A row format for heads of `head_dim` values."""

    name: str
    head_dim: int
    hadamard: bool = False  # rotate keys and queries by a Hadamard matrix

    dtype: ClassVar[torch.dtype] = torch.uint8

    def __post_init__(self) -> None:
        if self.name not in KV_QUANT_DTYPES:
            raise ValueError(f"The KV cache cannot be stored in {self.name!r}; use {', '.join(KV_QUANT_DTYPES)}.")

    @classmethod
    def for_head_dim(cls, name: str, head_dim: int) -> KVQuantFormat:
        """Return the format used for serving: int4 is rotated where head_dim is a power of two."""
        return cls(name, head_dim, hadamard=name == INT4 and head_dim & (head_dim - 1) == 0)

    @property
    def half_dim(self) -> int:
        """Half of head_dim padded to a power of two: the distance of the two codes in one byte of int4."""
        return 1 << max(self.head_dim - 1, 1).bit_length() - 1

    @property
    def code_bytes(self) -> int:
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
        """Rotate queries or keys [..., head_dim]."""
        return hadamard_transform(x) if self.hadamard else x

    def unrotate(self, x: Tensor) -> Tensor:
        return hadamard_transform(x, inverse=True) if self.hadamard else x

    def dequantize_keys(self, rows: Tensor, dtype: torch.dtype) -> Tensor:  # [..., row_bytes] -> [..., head_dim]
        """Dequantize and rotate back: the keys after RoPE, as the network computed them."""
        return self.unrotate(self.dequantize(rows, dtype))

    def quantize(self, x: Tensor) -> Tensor:  # [..., head_dim] -> [..., row_bytes], uint8
        """Quantize keys (already rotated) or values."""
        x = x.float()
        if self.name == INT4:
            codes, qparams = self._quantize_int4(x)
        elif self.name == INT8:
            codes, qparams = quantize_int8(x, min_scale=_MIN_SCALE)
            codes, qparams = codes.view(torch.uint8), qparams.clamp(min=_MIN_SCALE)
        else:
            qparams = (x.abs().amax(dim=-1, keepdim=True) / _FP8_MAX).clamp(min=_MIN_SCALE)
            codes = (x / qparams).to(torch.float8_e4m3fn).view(torch.uint8)
        padding = codes.new_zeros(*codes.shape[:-1], self.row_bytes - QPARAM_BYTES - self.code_bytes)
        return torch.cat((codes, padding, qparams.contiguous().view(torch.uint8)), dim=-1)

    def _quantize_int4(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return two codes per byte, and scale and zero point in the two halves of a word."""
        low, high = x.amin(dim=-1, keepdim=True).clamp(max=0), x.amax(dim=-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-7).half()
        zero = (-low / scale.float()).round().clamp(0, 15)
        codes = ((x / scale.float()).round() + zero).clamp(0, 15).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, 2 * self.half_dim - self.head_dim))
        qparams = torch.cat((scale.view(torch.int16), zero.to(torch.int16)), dim=-1)
        return codes[..., : self.half_dim] | codes[..., self.half_dim :] << 4, qparams

    def dequantize(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:  # -> [..., head_dim]
        """Dequantize rows [..., row_bytes]."""
        codes, qparams = rows[..., : self.code_bytes].contiguous(), rows[..., -QPARAM_BYTES:].contiguous()
        if self.name == INT4:
            scale, zero = qparams.view(torch.float16)[..., :1].float(), qparams.view(torch.int16)[..., 1:].float()
            unpacked = torch.cat((codes & 15, codes >> 4), dim=-1)[..., : self.head_dim]
            return ((unpacked.float() - zero) * scale).to(dtype)
        values = codes.view(torch.int8 if self.name == INT8 else torch.float8_e4m3fn)
        return (values.float() * qparams.view(torch.float32)).to(dtype)


def quantize_qkv(
    kv_quant: KVQuantFormat | None, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as pages of this format need them: rotated queries, quantized rows."""
    if kv_quant is None:
        return queries, keys, values
    return kv_quant.rotate(queries), kv_quant.quantize(kv_quant.rotate(keys)), kv_quant.quantize(values)


def row_layout(kv_quant: KVQuantFormat | None, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Return the length of the last axis of pages and their dtype, for a network of `dtype`."""
    return (head_dim, dtype) if kv_quant is None else (kv_quant.row_bytes, kv_quant.dtype)
