"""Compute the integer constants of operators that look functions up in tables (NN-LUT); `constants.py` has I-BERT's.

Paper: Yu et al., "NN-LUT: Neural Approximation of Non-Linear Operations for Efficient Transformer Inference", DAC 2022.
"""

from __future__ import annotations

import math

from torch import Tensor

from smelt.errors import ConfigError, ConversionError
from smelt.numerics.nn_lut import default_table
from smelt.numerics.piecewise_linear import IntegerTable, PiecewiseLinear
from smelt.runtime.integer.constants import norm_constants
from smelt.runtime.integer.table_ops import RECIPROCAL_INPUT_BITS, RESULT_BITS, RSQRT_INPUT_BITS

INPUT_LIMIT = 2**15 - 1  # of a table's input: 16 bits leave int32 results 15 bits of slope
_EXP_RANGE = 16.0  # exp(-16) is below half a step of 16 bits


def table_constants(
    table: PiecewiseLinear, scale: float, layer: str, limit: int = INPUT_LIMIT
) -> tuple[dict[str, Tensor], float]:
    """Return the constants of a `table` node on inputs of a scale up to `limit`, and the scale of its int32 output."""
    integers = _integers(table, scale, limit, layer)
    return _constants(integers), integers.output_scale


def softmax_table_constants(
    scale: float, length: int, layer: str, levels: int = 127, *, exp: PiecewiseLinear | None = None, entries: int = 16
) -> tuple[dict[str, int], dict[str, Tensor], float]:
    """Return attributes, constants and output scale of `softmax_table` over rows of up to `length`."""
    # The sum of a row fits into int32, and exp times levels times a reciprocal into int64.
    exp_bits = min(20, 30 - length.bit_length(), 61 - RESULT_BITS - levels.bit_length())
    if exp_bits < 8:
        raise ConversionError(
            f"{layer}: a softmax over {length} positions with {levels} levels overflows its integers; "
            "shorten the sequences."
        )
    lowest = math.floor(_EXP_RANGE / scale)
    if not 1 <= lowest < 2**30:
        raise ConversionError(
            f"{layer}: exp has no table for inputs of scale {scale:.3g}; it must be between 1.5e-8 and 16."
        )
    output_bits = math.floor(30 - math.log2(scale))  # slopes of at most 1 become int32
    table = _integers(exp or default_table("exp", entries), scale, lowest, layer, output_bits)
    attributes = {"levels": levels, "lowest": -lowest, "exp_bits": exp_bits, "exp_shift": output_bits - exp_bits}
    reciprocal = _octave_table(default_table("reciprocal", entries), RECIPROCAL_INPUT_BITS, layer)
    return attributes, {**_constants(table, "exp_"), **_constants(reciprocal, "reciprocal_")}, 1 / levels


def norm_table_constants(
    scale: float, limit: int, weight: Tensor, bias: Tensor | None, epsilon: float, layer: str, entries: int = 16
) -> tuple[dict[str, int], dict[str, Tensor], float]:
    """Return attributes, constants and output scale of `layer_norm_table`, or of `rms_norm_table` without a bias."""
    attributes, constants, output_scale = norm_constants(scale, limit, weight, bias, epsilon, layer)
    del attributes["reciprocal_bits"]
    if (2 * limit + 1).bit_length() + RESULT_BITS + 1 > 62:
        raise ConversionError(f"{layer}: a norm of inputs up to {limit} overflows int64; requantize them first.")
    rsqrt = _octave_table(default_table("rsqrt", entries), RSQRT_INPUT_BITS, layer)
    return attributes, {**constants, **_constants(rsqrt)}, output_scale


def _octave_table(table: PiecewiseLinear, input_bits: int, layer: str) -> IntegerTable:
    """Convert a table of [1, 2) or [1, 4) to inputs in units of 2^-input_bits and results in units of 2^-29."""
    return _integers(table, 2.0**-input_bits, 2**16 - 1, layer, RESULT_BITS)


def _integers(
    table: PiecewiseLinear, scale: float, limit: int, layer: str, output_bits: int | None = None
) -> IntegerTable:
    try:
        return table.to_integer(scale, limit, output_bits=output_bits)
    except ConfigError as error:
        raise ConversionError(f"{layer}: {error}") from error


def _constants(table: IntegerTable, prefix: str = "") -> dict[str, Tensor]:
    return {
        f"{prefix}breakpoints": table.breakpoints,
        f"{prefix}slopes": table.slopes,
        f"{prefix}intercepts": table.intercepts,
    }
