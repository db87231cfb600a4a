"""Keys and values of pages in few bits: each head's vector of a token is a row of bytes, its codes and then one word.

A value is scale * (code - zero). Rows are moved like any others, so that whatever keeps, drops, copies or fetches pages
need not know what is in them; only who writes vectors encodes them, and attention reads codes.

    int8  a code a byte, from -127; the word is the scale, float32
    fp8   E4M3 a byte; the word is the scale, float32
    int4  two codes a byte, the second that of half a padded row later; the word is the scale, float16, and the zero

Keys may be turned by a Hadamard matrix before they are rounded, queries with them, which leaves their products as they
were (QuaRot, Ashkboos et al., 2024): channels that are large in every key no longer take the whole range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smelt.kernels.hadamard import hadamard_transform

INT8, FP8, INT4 = "int8", "fp8", "int4"
KV_QUANT_DTYPES = (INT8, FP8, INT4)
QPARAM_BYTES = 4  # bytes
LARGEST = {INT8: 127.0, FP8: 448.0, INT4: 15.0}


@dataclass(frozen=True)
class KVQuantFormat:
    """Of vectors of `width` numbers."""

    name: str
    head_dim: int
    hadamard: bool = False  # keys and queries, by a Hadamard matrix

    dtype: ClassVar[torch.dtype] = torch.uint8

    def __post_init__(self) -> None:
        if self.name not in KV_QUANT_DTYPES:
            raise ValueError(f"keys and values cannot be held in {self.name!r}; there is {', '.join(KV_QUANT_DTYPES)}.")

    @classmethod
    def for_head_dim(cls, name: str, head_dim: int) -> KVQuantFormat:
        """As they are served: eight bits need no turning, and widths that are no power of two have none."""
        return cls(name, head_dim, hadamard=name == INT4 and head_dim & (head_dim - 1) == 0)

    @property
    def half_dim(self) -> int:
        """Of a row padded to a power of two: what lies beside each other in a byte of int4."""
        return 1 << max(self.head_dim - 1, 1).bit_length() - 1

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return self.half_dim if self.name == INT4 else self.head_dim

    @property
    def row_bytes(self) -> int:
        """Of a row; a multiple of the word's."""
        return -(-self.code_bytes // QPARAM_BYTES) * QPARAM_BYTES + QPARAM_BYTES

    def rotate(self, x: Tensor) -> Tensor:
        """Queries or keys [..., width], as they meet each other."""
        return hadamard_transform(x) if self.hadamard else x

    def unrotate(self, x: Tensor) -> Tensor:
        return hadamard_transform(x, inverse=True) if self.hadamard else x

    def dequantize_keys(self, rows: Tensor, dtype: torch.dtype) -> Tensor:  # [..., bytes] -> [..., width]
        """As the network gave them, turned by their positions alone."""
        return self.unrotate(self.dequantize(rows, dtype))

    def quantize(self, x: Tensor) -> Tensor:  # [..., width] -> [..., bytes], uint8
        """Vectors as they are to be read, keys already turned."""
        x = x.float()
        if self.name == INT4:
            codes, word = self._four_bits(x)
        else:
            scale = (x.abs().amax(dim=-1, keepdim=True) / LARGEST[self.name]).clamp(min=1e-30)
            codes = (x / scale).round().to(torch.int8) if self.name == INT8 else (x / scale).to(torch.float8_e4m3fn)
            codes, word = codes.view(torch.uint8), scale
        gap = codes.new_zeros(*codes.shape[:-1], self.row_bytes - QPARAM_BYTES - self.code_bytes)
        return torch.cat((codes, gap, word.contiguous().view(torch.uint8)), dim=-1)

    def _four_bits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two codes a byte, and scale and zero in two halves of a word."""
        low, high = x.amin(dim=-1, keepdim=True).clamp(max=0), x.amax(dim=-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-7).half()
        zero = (-low / scale.float()).round().clamp(0, 15)
        codes = ((x / scale.float()).round() + zero).clamp(0, 15).to(torch.uint8)
        codes = torch.nn.functional.pad(codes, (0, 2 * self.half_dim - self.head_dim))
        word = torch.cat((scale.view(torch.int16), zero.to(torch.int16)), dim=-1)
        return codes[..., : self.half_dim] | codes[..., self.half_dim :] << 4, word

    def dequantize(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:  # [..., bytes] -> [..., width]
        """What `encode` was given, as nearly as it is held."""
        codes, word = rows[..., : self.code_bytes].contiguous(), rows[..., -QPARAM_BYTES:].contiguous()
        if self.name == INT4:
            scale, zero = word.view(torch.float16)[..., :1].float(), word.view(torch.int16)[..., 1:].float()
            both = torch.cat((codes & 15, codes >> 4), dim=-1)[..., : self.head_dim]
            return ((both.float() - zero) * scale).to(dtype)
        numbers = codes.view(torch.int8 if self.name == INT8 else torch.float8_e4m3fn)
        return (numbers.float() * word.view(torch.float32)).to(dtype)


def quantize_qkv(
    kv_quant: KVQuantFormat | None, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As pages in this format have them: queries to ask with, rows of keys and values to write."""
    if kv_quant is None:
        return queries, keys, values
    return kv_quant.rotate(queries), kv_quant.quantize(kv_quant.rotate(keys)), kv_quant.quantize(values)


def row_layout(kv_quant: KVQuantFormat | None, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """The last axis of pages, and their type, for heads of `width` numbers of a network of this type."""
    return (head_dim, dtype) if kv_quant is None else (kv_quant.row_bytes, kv_quant.dtype)
