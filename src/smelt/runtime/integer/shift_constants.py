"""Compute the integer constants of operators by shifts (I-ViT); `constants.py` has I-BERT's.

Paper: Li and Gu, "I-ViT: Integer-only Quantization for Efficient Vision Transformer Inference", ICCV 2023.
"""

from __future__ import annotations

from smelt.errors import ConversionError
from smelt.runtime.integer.constants import INT32_MAX, softmax_bits

_MAX_HALVINGS = 30
_MAX_SIGMOID_BITS, _MIN_SIGMOID_BITS = 15, 7  # the paper's sigmoid has 7
_EXP_BITS = 20  # of exp(0) in the sigmoid


def shift_exp_constants(scale: float, bits: int, layer: str) -> dict[str, int]:
    """Return the constants of ShiftExp whose result for 0 has exactly `bits` bits."""
    q_one = round(1 / scale)
    if not 1e-9 <= scale <= 1:
        raise ConversionError(
            f"{layer}: exp has no form by shifts for inputs of scale {scale:.3g}; it must be between 1e-9 and 1."
        )
    width = q_one.bit_length()
    return {
        "q_one": q_one, "max_halvings": _MAX_HALVINGS, "lift": max(0, bits - width), "drop": max(0, width - bits),
    }  # fmt: skip


def gelu_shift_constants(
    scale: float, limit: int, layer: str, maximum: int = INT32_MAX
) -> tuple[dict[str, int], float]:
    """Return the constants of ShiftGELU for inputs up to `limit`, and the output's scale.

    The sigmoid has as many bits as the output leaves room for below `maximum`.
    """
    bits = min(_MAX_SIGMOID_BITS, (maximum // max(limit, 1)).bit_length() - 1)
    if bits < _MIN_SIGMOID_BITS:
        raise ConversionError(
            f"{layer}: GELU has no form by shifts for inputs of scale {scale:.3g} up to {limit}; "
            "requantize its input to 16 bits first."
        )
    return {"sigmoid_bits": bits, **shift_exp_constants(scale, _EXP_BITS, layer)}, scale / 2**bits


def softmax_shift_constants(scale: float, length: int, layer: str, levels: int = 127) -> tuple[dict[str, int], float]:
    """Return the constants of Shiftmax over rows of up to `length`, and the probabilities' scale, `1 / levels`."""
    bits, reciprocal_bits = softmax_bits(length, layer, levels)
    constants = shift_exp_constants(scale, bits, layer)
    return {"levels": levels, "reciprocal_bits": reciprocal_bits, **constants}, 1 / levels
