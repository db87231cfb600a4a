"""Nested integers: the leading bits of an 8-bit code are a smaller integer (MatQuant; Nair et al., 2025)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.numerics.format import QuantizedTensor, QuantParams
from smelt.numerics.integer import Integer


def check_nested(number_format: object, bits: int) -> Integer:
    """Return the format if codes of so many bits can be sliced out of its own."""
    if type(number_format) is not Integer or not number_format.symmetric:
        raise FormatError(f"{number_format} has no nested integers; use symmetric integers such as int8/64.")
    if not 2 <= bits <= number_format.bits:
        raise FormatError(f"codes of {number_format.bits} bits can be sliced to 2 to {number_format.bits}, not {bits}.")
    return number_format


def slice_codes(codes: Tensor, stored: int, bits: int) -> Tensor:
    """Round codes of `stored` bits to the nearest of their leading `bits`: uint8 -> uint8 below 2^bits."""
    shift = stored - bits
    if not shift:
        return codes
    rounded = (codes.int() + (1 << (shift - 1))) >> shift
    return rounded.clamp(max=(1 << bits) - 1).to(torch.uint8)


def slice_tensor(quantized: QuantizedTensor, bits: int) -> QuantizedTensor:
    """Return the integers of fewer bits that are nested in quantized values: the same scales, in larger steps."""
    number_format = check_nested(quantized.format, bits)
    codes = slice_codes(quantized.codes, number_format.bits, bits)
    scale = number_format.round_scale(quantized.qparams.scale * 2 ** (number_format.bits - bits))
    if not bool(scale.isfinite().all()):
        raise FormatError(
            f"scales overflow when {number_format.bits} bits are sliced to {bits}; store them in float32."
        )
    return QuantizedTensor(replace(number_format, bits=bits), codes, QuantParams(scale))
