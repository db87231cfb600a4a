"""Pack codes of 1 to 8 bits into bytes, the first code in the lowest bits; codes may straddle bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def packed_columns(columns: int, bits: int) -> int:
    """Return the number of bytes of a row of codes."""
    return math.ceil(columns * bits / 8)


def pack(codes: Tensor, bits: int) -> Tensor:  # uint8 [..., columns] -> uint8 [..., bytes]
    if bits == 8:
        return codes.contiguous()
    period = 8 // math.gcd(bits, 8)  # number of codes that fill an integral number of bytes
    columns = codes.shape[-1]
    padded = torch.nn.functional.pad(codes, (0, -columns % period)).unflatten(-1, (-1, period))
    size, word_dtype = bits * period // 8, _word_dtype(bits * period)
    word = torch.zeros(padded.shape[:-1], dtype=word_dtype, device=codes.device)
    for position in range(period):
        word |= padded[..., position].to(word_dtype) << (bits * position)
    if size == 1:
        return word
    octets = torch.stack([(word >> (8 * octet)) & 255 for octet in range(size)], dim=-1)
    return octets.flatten(-2).to(torch.uint8)[..., : packed_columns(columns, bits)].contiguous()


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:  # uint8 [..., bytes] -> uint8 [..., columns]
    if bits == 8:
        return packed[..., :columns]
    period = 8 // math.gcd(bits, 8)
    size, word_dtype = bits * period // 8, _word_dtype(bits * period)
    octets = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % size)).unflatten(-1, (-1, size))
    word = torch.zeros(octets.shape[:-1], dtype=word_dtype, device=packed.device)
    for octet in range(size):
        word |= octets[..., octet].to(word_dtype) << (8 * octet)
    mask = (1 << bits) - 1
    codes = torch.stack([(word >> (bits * position)) & mask for position in range(period)], dim=-1)
    return codes.flatten(-2)[..., :columns].to(torch.uint8)


def _word_dtype(bits: int) -> torch.dtype:
    """Return the smallest dtype that holds the codes of a period: it determines the peak memory of packing."""
    return torch.uint8 if bits == 8 else torch.int32 if bits < 32 else torch.int64
