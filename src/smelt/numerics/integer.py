"""Integer formats: uniform quantization, symmetric or with a zero point, and dINT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from smelt.errors import FormatError
from smelt.numerics.format import PER_TENSOR, Format, QuantParams, drop_infinities, global_amax, group_amax
from smelt.numerics.scales import exact_divide, round_scale

ZeroDtype = Literal["code", "float16", "float32"]
_ZERO_BITS: dict[ZeroDtype, int] = {"code": 8, "float16": 16, "float32": 32}


@dataclass(frozen=True)
class Integer(Format):
    """b-bit integers. Codes are unsigned: `value = (code - zero) * scale`, with zero in the middle if symmetric.

    `full_range` spreads a symmetric range over all codes, scale = amax / (2^b - 1) * 2, as compressed-tensors does: the
    largest value may lose half a step. Otherwise scale = amax / (2^(b-1) - 1).
    """

    bits: int = 4
    symmetric: bool = True
    full_range: bool = False
    zero_dtype: ZeroDtype = "code"  # an integer code, or fractional, stored in float16 or float32

    @property
    def qmax(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def check(self) -> None:
        super().check()
        if not 2 <= self.bits <= 8:
            raise FormatError(f"integers have 2 to 8 bits, not {self.bits}.")
        if self.symmetric and self.zero_dtype != "code":
            raise FormatError("symmetric integers have no zero point; leave out its dtype.")
        if self.full_range and not self.symmetric:
            raise FormatError("full_range applies to a symmetric range; leave it out with zero points.")

    def compute_qparams(
        self, x: Tensor, *, clip_ratio: Tensor | float = 1.0, tensor_amax: Tensor | None = None
    ) -> QuantParams:
        if self.symmetric:
            span = self.qmax / 2 if self.full_range else self.qmax // 2
            amax = group_amax(x, self)
            scale = torch.where(amax == 0, 1.0, exact_divide(amax * clip_ratio, span))
            return QuantParams(round_scale(scale, self.scale_dtype))
        low, high = group_min_max(x, self)
        return self.qparams_from_range(low * clip_ratio, high * clip_ratio)

    def qparams_from_range(self, low: Tensor, high: Tensor) -> QuantParams:
        """Compute asymmetric parameters for the range from `low` (at most 0) to `high` (at least 0)."""
        scale = torch.where(high == low, 1.0, exact_divide(high - low, self.num_steps))
        scale = round_scale(scale, self.scale_dtype)
        zero = (-low / scale).round().clamp(0, self.num_steps)
        return QuantParams(scale, zero.nan_to_num(nan=0.0))  # NaN is carried by the scale: a byte cannot

    @property
    def num_steps(self) -> int:
        """Number of steps between the smallest value and the largest."""
        return self.qmax

    def round_scale(self, scale: Tensor) -> Tensor:
        """Round to the stored dtype."""
        return round_scale(scale, self.scale_dtype)

    def round_zero(self, zero: Tensor) -> Tensor:
        """Round to the stored dtype."""
        if self.zero_dtype == "code":
            return zero.round().clamp(0, self.qmax)
        return zero.half().float() if self.zero_dtype == "float16" else zero.float()

    @property
    def has_integer_zero_point(self) -> bool:
        return not self.symmetric and self.zero_dtype == "code"

    @property
    def qparams_bits(self) -> int:
        return super().qparams_bits + (0 if self.symmetric else _ZERO_BITS[self.zero_dtype])

    def _store(self, name: str, tensor: Tensor) -> Tensor:
        if name != "zero" or self.zero_dtype == "code":
            return super()._store(name, tensor)
        return tensor.half() if self.zero_dtype == "float16" else tensor.float()

    def quantize_groups(self, x: Tensor, qparams: QuantParams) -> Tensor:
        zero = self.zero_point(qparams)
        steps = x / qparams.scale
        codes = steps.round() + zero if self.zero_dtype == "code" else (steps + zero).round()
        return codes.nan_to_num(nan=0.0).clamp(0, self.qmax).to(torch.uint8)

    def quantize_groups_stochastic(
        self, x: Tensor, qparams: QuantParams, generator: torch.Generator | None = None
    ) -> Tensor:
        steps = x / qparams.scale + (self.zero_point(qparams) if self.zero_dtype != "code" else 0.0)
        codes = stochastic_round(steps, 1.0, generator) + (
            self.zero_point(qparams) if self.zero_dtype == "code" else 0.0
        )
        return codes.nan_to_num(nan=0.0).clamp(0, self.qmax).to(torch.uint8)

    def dequantize_groups(self, codes: Tensor, qparams: QuantParams) -> Tensor:
        return (codes.float() - self.zero_point(qparams)) * qparams.scale

    def zero_point(self, qparams: QuantParams) -> Tensor | float:
        return float(self.qmax // 2 + 1) if qparams.zero is None else qparams.zero


@dataclass(frozen=True)
class DenormalInteger(Integer):
    """dINT: two codes encode plus and minus half a step, where most weights lie (Lee et al., 2023).

    The two codes near zero are those of the paper; its exact code points are not confirmed.
    """

    symmetric: bool = False
    full_range: ClassVar[bool] = False  # type: ignore[misc]

    @property
    def num_steps(self) -> int:
        return self.qmax - 2

    def check(self) -> None:
        super().check()
        if self.bits < 3:
            raise FormatError("dint has 3 to 8 bits: two codes encode half a step.")
        if self.zero_dtype != "code":
            raise FormatError("the zero point of dint is a code.")

    def compute_qparams(
        self, x: Tensor, *, clip_ratio: Tensor | float = 1.0, tensor_amax: Tensor | None = None
    ) -> QuantParams:
        if not self.symmetric:
            low, high = group_min_max(x, self)
            return self.qparams_from_range(low * clip_ratio, high * clip_ratio)
        amax = group_amax(x, self)
        return QuantParams(
            round_scale(
                torch.where(amax == 0, 1.0, exact_divide(amax * clip_ratio, self.num_steps // 2)),
                self.scale_dtype,
            )
        )

    def quantize_groups(self, x: Tensor, qparams: QuantParams) -> Tensor:
        return self._round_to_code(x / qparams.scale, qparams)

    def quantize_groups_stochastic(
        self, x: Tensor, qparams: QuantParams, generator: torch.Generator | None = None
    ) -> Tensor:
        steps = x / qparams.scale
        grain = torch.where(steps.abs() < 1, 0.5, 1.0)
        return self._round_to_code(stochastic_round(steps, grain, generator), qparams)

    def _round_to_code(self, steps: Tensor, qparams: QuantParams) -> Tensor:
        """Round to the nearest code. On a side of zero without a full step, the half step is the end of the grid."""
        zero = self.zero_point(qparams)
        codes = (steps.round() + zero).nan_to_num(nan=0.0).clamp(0, self._max_full_step_code)
        codes = torch.where(
            (steps >= 0.25) & ((steps < 0.75) | (zero >= self._max_full_step_code)), self.qmax - 1, codes
        )
        codes = torch.where((steps <= -0.25) & ((steps > -0.75) | (zero <= 0)), self.qmax, codes)
        return codes.to(torch.uint8)

    def dequantize_groups(self, codes: Tensor, qparams: QuantParams) -> Tensor:
        return self.doubled(codes, qparams) * (qparams.scale / 2)

    def doubled(self, codes: Tensor, qparams: QuantParams) -> Tensor:
        """Return integers, twice the value in steps, for int8 products with half the scale."""
        plain = 2 * (codes.float() - self.zero_point(qparams))
        return torch.where(codes == self.qmax - 1, 1.0, torch.where(codes == self.qmax, -1.0, plain))

    def zero_point(self, qparams: QuantParams) -> Tensor | float:
        return float(self.num_steps // 2) if qparams.zero is None else qparams.zero

    @property
    def _max_full_step_code(self) -> int:
        """The largest code that is not a half step: a symmetric grid has as many steps below zero as above."""
        return 2 * (self.num_steps // 2) if self.symmetric else self.num_steps


def quantize_int8(x: Tensor, *, min_scale: float) -> tuple[Tensor, Tensor]:
    """Quantize groups [..., size] to symmetric int8 codes -127..127, with scales [..., 1] = amax / 127.

    `min_scale` only guards the division: the returned scale of a group of zeros is 0.
    Used where rows are stored or sent as they are: the quantized KV cache and gradients on the wire. `Integer(bits=8)`
    is a different formula (unsigned codes with -128 in range, a rounded scale that is 1 for zeros, infinities ignored),
    which artifacts depend on.
    """
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    codes = (x / scale.clamp(min=min_scale)).round().clamp(-127, 127).to(torch.int8)
    return codes, scale


def stochastic_round(steps: Tensor, grain: Tensor | float, generator: torch.Generator | None) -> Tensor:
    """Round stochastically to one of the two neighboring multiples of the grain."""
    low = (steps / grain).floor() * grain
    uniform = torch.rand(steps.shape, generator=generator, device=steps.device, dtype=torch.float32)
    return torch.where(uniform < (steps - low) / grain, low + grain, low)


def group_min_max(x: Tensor, number_format: Format) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of each group, with zero included so that it is exact."""
    finite = drop_infinities(x)
    low, high = finite.amin(-1, keepdim=True).clamp(max=0), finite.amax(-1, keepdim=True).clamp(min=0)
    if number_format.group_size == PER_TENSOR:
        return -global_amax(-low), global_amax(high)
    return low, high
