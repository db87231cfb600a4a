"""Packing codes into bytes: round trips, bit order by hand, and sizes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smelt.numerics.packing import pack, packed_columns, unpack


def hexadecimal(codes: list[int], bits: int) -> str:
    """Return the bytes of a row in order, as hexadecimal."""
    return bytes(pack(torch.tensor(codes, dtype=torch.uint8), bits).tolist()).hex()


def test_the_word_of_four_bit_codes_0_to_7() -> None:
    """Read as a little-endian word this is 0x76543210, as in compressed-tensors."""
    packed = pack(torch.arange(8, dtype=torch.uint8), 4)
    assert int(packed.view(torch.int32)) == 0x76543210


def test_bits_of_other_widths_by_hand() -> None:
    assert hexadecimal([1, 0, 1, 1, 0, 0, 0, 1, 1], 1) == "8d01"
    assert hexadecimal([3, 0, 1, 2], 2) == "93"
    assert hexadecimal([1, 2, 3, 4, 5, 6, 7, 0], 3) == "d1581f"  # 0b000_111_110_101_100_011_010_001
    assert hexadecimal([1, 31, 2], 5) == "e10b"  # 0b00010_11111_00001
    assert hexadecimal([0x3F, 0x01], 6) == "7f00"
    assert hexadecimal([0x7F, 0x01], 7) == "ff00"
    assert hexadecimal([1, 2, 255], 8) == "0102ff"


@given(st.integers(1, 8), st.integers(0, 70), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_round_trip(bits: int, columns: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, generator=generator)
    packed = pack(codes, bits)
    assert packed.shape == (rows, packed_columns(columns, bits)) and packed.is_contiguous()
    assert packed.dtype == torch.uint8 and packed_columns(columns, bits) == -(-columns * bits // 8)
    assert torch.equal(unpack(packed, bits, columns), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_other_shapes_and_strides(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 13, 5), dtype=torch.uint8)
    for shaped in (codes, codes.transpose(0, 2), codes[0, :, 0], codes[..., ::2]):
        assert torch.equal(unpack(pack(shaped, bits), bits, shaped.shape[-1]), shaped)


@pytest.mark.parametrize("bits", range(1, 9))
def test_all_ones_round_trip(bits: int) -> None:
    """No code is truncated by a word that is too small."""
    codes = torch.full((8,), (1 << bits) - 1, dtype=torch.uint8)
    assert pack(codes, bits).tolist() == [255] * bits
