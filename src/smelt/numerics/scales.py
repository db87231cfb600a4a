"""Stored dtypes of scales: a scale is rounded to its dtype before elements are quantized with it.

A scale is never zero (it is a divisor): if it rounds to zero, the smallest positive value is used, and a group of zeros
has scale 1. NaN stays NaN, so that a group with a NaN dequantizes to NaN.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from smelt.numerics.gradient import straight_through

ScaleDtype = Literal["float32", "float16", "bfloat16", "e8m0", "e8m0-up", "e4m3", "e5m2"]
FLOAT_SCALES: tuple[ScaleDtype, ...] = ("float32", "float16", "bfloat16", "e4m3", "e5m2")  # rounded to nearest
POWER_OF_TWO_SCALES: tuple[ScaleDtype, ...] = ("e8m0", "e8m0-up")  # powers of two
STORED_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "e8m0": 8, "e8m0-up": 8, "e4m3": 8, "e5m2": 8}
_TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
_MIN_POSITIVE = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126, "e4m3": 2.0**-9, "e5m2": 2.0**-16}
_MAX_VALUES = {"float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.38e38, "e4m3": 448.0, "e5m2": 57344.0}
BIAS, NAN_BYTE = 127, 255  # of E8M0


def exact_divide(x: Tensor, number: float) -> Tensor:
    """Return x / number, bit-identical on all devices: on GPU, PyTorch multiplies by the reciprocal of a scalar."""
    return x / x.new_full((), number)


def round_scale(scale: Tensor, dtype: ScaleDtype) -> Tensor:
    """Round scales to a stored dtype (not a power-of-two one), in float32. Gradients pass straight through: those of
    the conversion would be rounded to the same dtype, and overflow."""
    bounded = scale.float().clamp(max=_MAX_VALUES[dtype])
    stored = bounded.detach().to(_TORCH_DTYPES[dtype]).float().clamp(min=_MIN_POSITIVE[dtype])
    return straight_through(bounded, stored) if scale.requires_grad else stored


def power_of_two_scale(amax: Tensor, dtype: ScaleDtype, top_exponent: int) -> Tensor:
    """Return the OCP scale: 2^(floor(log2 amax) - exponent of the largest element). `e8m0-up` takes the next power if
    the mantissa is 1.75 or more, which would otherwise saturate."""
    mantissa, exponent = torch.frexp(amax.float())  # mantissa in [0.5, 1)
    if dtype == "e8m0-up":
        exponent = exponent + (mantissa >= 0.875).int()
    stored = (exponent - 1 - top_exponent + BIAS).clamp(0, 2 * BIAS)
    return load_scale(stored.masked_fill(amax.isnan(), NAN_BYTE), dtype)


def store_scale(scale: Tensor, dtype: ScaleDtype) -> Tensor:
    """Convert to the stored dtype; E8M0 is a byte with the exponent."""
    if dtype not in POWER_OF_TWO_SCALES:
        return scale.to(_TORCH_DTYPES[dtype])
    _, exponent = torch.frexp(scale)
    return torch.where(scale.isnan(), NAN_BYTE, exponent - 1 + BIAS).to(torch.uint8)


def load_scale(stored: Tensor, dtype: ScaleDtype) -> Tensor:
    """Invert `store_scale`, in float32."""
    return _powers_of_two(stored.device)[stored.int()] if dtype in POWER_OF_TWO_SCALES else stored.float()


@lru_cache(maxsize=16)
def _powers_of_two(device: torch.device) -> Tensor:
    """Return the value of each E8M0 byte. A table, because not every device computes powers exactly."""
    powers = [2.0 ** (byte - BIAS) for byte in range(NAN_BYTE)]
    return torch.tensor([*powers, float("nan")], device=device, dtype=torch.float32)
