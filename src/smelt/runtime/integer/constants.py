"""Compute the integer constants of the nonlinear operators from scales (I-BERT), with the widths they need.

Every function returns the attributes of a node and the scale of its output, or raises a `ConversionError` that names
the layer if integers cannot represent the function at that scale.

Paper: Kim et al., "I-BERT: Integer-only BERT Quantization", ICML 2021.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smelt.errors import ConversionError

INT32_MAX = 2**31 - 1

_ERF_A, _ERF_B = 0.2888, 1.769  # erf(u) ~ sign(u) * (1 - a * (min(|u|, b) - b)**2)
_EXP = (0.35815147, 0.96963238, 1.0)  # exp(r) ~ 0.358 r**2 + 0.970 r + 1 for r in (-ln 2, 0]
_NORM_WEIGHT_BITS = 12  # of a LayerNorm weight, sign included
_MAX_HALVINGS = 30


def gelu_constants(scale: float, limit: int, layer: str, maximum: int = INT32_MAX) -> tuple[dict[str, int], float]:
    """Return q_b, q_c, q_one and shift of i-GELU for inputs up to `limit`, and the output's scale.

    The shift is the smallest with which the output stays within `maximum`, since every dropped bit costs accuracy.
    """
    inner = scale / math.sqrt(2)
    q_b, q_c = math.floor(_ERF_B / inner), math.floor(1 / (_ERF_A * inner**2))
    shift = 0
    while limit * (2 * (q_c >> shift) + 1) > maximum:
        shift += 1
    q_one = q_c >> shift
    if q_b < 1 or q_one < 1 or q_b**2 >= 2**62:
        raise ConversionError(
            f"{layer}: GELU has no integer form for inputs of scale {scale:.3g} up to {limit}; "
            "requantize its input to 16 bits first."
        )
    return {"q_b": q_b, "q_c": q_c, "q_one": q_one, "shift": shift}, scale * _ERF_A * inner**2 * 2**shift / 2


def exp_constants(scale: float, bits: int, layer: str) -> dict[str, int]:
    """Return the constants of i-exp whose result for 0 has exactly `bits` bits."""
    a, b, c = _EXP
    q_ln2, q_b, q_c = math.floor(math.log(2) / scale), math.floor(b / a / scale), math.floor(c / a / scale**2)
    if q_ln2 < 1 or q_c.bit_length() > 62:
        raise ConversionError(
            f"{layer}: exp has no integer form for inputs of scale {scale:.3g}; it must be between 1e-9 and 0.69."
        )
    width = q_c.bit_length()
    return {
        "q_ln2": q_ln2, "q_b": q_b, "q_c": q_c, "max_halvings": _MAX_HALVINGS,
        "lift": max(0, bits - width), "drop": max(0, width - bits),
    }  # fmt: skip


def softmax_constants(scale: float, length: int, layer: str, levels: int = 127) -> tuple[dict[str, int], float]:
    """Return the constants of i-softmax over rows of up to `length`, and the probabilities' scale, `1 / levels`."""
    bits, reciprocal_bits = softmax_bits(length, layer, levels)
    constants = exp_constants(scale, bits, layer)
    return {"levels": levels, "reciprocal_bits": reciprocal_bits, **constants}, 1 / levels


def softmax_bits(length: int, layer: str, levels: int) -> tuple[int, int]:
    """Return the bits of exp(0) and of the reciprocal in a softmax over rows of up to `length`.

    exp has as many bits (20 at most) as an int32 sum over the row permits; the reciprocal of the sum fits into int32.
    """
    bits = min(20, 30 - length.bit_length())
    if bits < 8:
        raise ConversionError(f"{layer}: a softmax over {length} positions overflows int32; shorten the sequences.")
    return bits, 31 + bits - 1 - levels.bit_length()


def tanh_constants(scale: float, layer: str, levels: int = 127) -> tuple[dict[str, int], float]:
    """Return the constants of tanh for inputs of a scale, and the output's scale, `1 / levels`."""
    return {"levels": levels, **exp_constants(2 * scale, 20, layer)}, 1 / levels


def silu_constants(scale: float, limit: int, layer: str) -> tuple[dict[str, int], float]:
    """Return the constants of i-SiLU for inputs up to `limit`, and the output's scale.

    The sigmoid has as many bits (15 at most) as an int32 product with the input permits. For |x| up to 10 the largest
    error is 8.5e-4 at scales below 0.01, and 2.1e-3 at 0.01.
    """
    bits = min(15, 31 - limit.bit_length())
    if bits < 8:
        raise ConversionError(
            f"{layer}: SiLU of inputs up to {limit} overflows int32; requantize them to 16 bits first."
        )
    return {"bits": bits, **exp_constants(scale, 20, layer)}, scale / 2**bits


def norm_constants(
    scale: float, limit: int, weight: Tensor, bias: Tensor | None, epsilon: float, layer: str
) -> tuple[dict[str, int], dict[str, Tensor], float]:
    """Return attributes, constants (int32 weight and bias) and output scale of LayerNorm, or of RMSNorm without a bias.

    The weight is an integer factor, not part of a scale as in the paper, where `bias / weight` explodes for weights
    near zero. The paper's dynamic shift of the squares is chosen here from the bound of the input, so it is static.
    """
    length = weight.numel()
    weight, shifts = weight.detach().double().cpu(), torch.zeros(length, dtype=torch.float64)
    shifts = shifts if bias is None else bias.detach().double().cpu()
    shift = 0
    while length * ((2 * limit >> shift) + 1) ** 2 + 1 >= 2**60:
        shift += 1
    q_epsilon = math.floor(length * epsilon / scale**2) >> (2 * shift)
    if q_epsilon >= 2**60:
        raise ConversionError(f"{layer}: the epsilon of a norm overflows int64 at the scale {scale:.3g} of its input.")
    output_bits = 17
    for bits in range(_NORM_WEIGHT_BITS, 3, -1):
        weight_scale = max(weight.abs().max().item(), 1e-30) / (2 ** (bits - 1) - 1)
        output_scale = weight_scale * math.sqrt(length) / 2**output_bits
        q_weight, q_bias = (weight / weight_scale).round(), (shifts / output_scale).round()
        if (2 ** (output_bits + 1) * q_weight.abs() + q_bias.abs()).max().item() <= INT32_MAX:
            break
    else:
        raise ConversionError(f"{layer}: the bias of a norm is too large for int32 beside its weight.")
    attributes = {"epsilon": q_epsilon, "shift": shift, "reciprocal_bits": 45, "output_bits": output_bits}
    constants = {"weight": q_weight.to(torch.int32)}
    if bias is not None:
        constants["bias"] = q_bias.to(torch.int32)
    return attributes, constants, output_scale
