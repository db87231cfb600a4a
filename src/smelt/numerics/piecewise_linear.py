"""Piecewise linear tables of a scalar function, and NN-LUT's exact conversion of a ReLU network (Yu et al., 2022).

A table of N entries has N - 1 ascending breakpoints and N slopes and intercepts: with k the number of breakpoints that
are at most x, y = slopes[k] * x + intercepts[k]. One comparison tree, one multiplication and one addition evaluate any
function. Tables are float64 until they are stored: as float32, float16 or integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.errors import ConfigError

Function = Callable[[Tensor], Tensor]
Line = tuple[float, float]  # slope, intercept
MAX_SLOPE_BITS = 30


@dataclass(frozen=True)
class IntegerTable:
    """A table on integers: x = input_scale * q becomes y = output_scale * (slopes[k] * q + intercepts[k]).

    Breakpoints and slopes are int32 and intercepts int64. For |q| up to the bound that the table was made for, the
    results fit into int32.
    """

    breakpoints: Tensor
    slopes: Tensor
    intercepts: Tensor
    output_scale: float

    def __call__(self, q: Tensor) -> Tensor:
        """Look up integers of any shape; returns int64."""
        entry = torch.searchsorted(self.breakpoints.long(), q.long(), right=True)
        return self.slopes.long()[entry] * q.long() + self.intercepts[entry]


@dataclass(frozen=True)
class PiecewiseLinear:
    """A table of N entries in one floating point dtype: breakpoints [N - 1] ascending, slopes [N], intercepts [N]."""

    breakpoints: Tensor
    slopes: Tensor
    intercepts: Tensor

    def __post_init__(self) -> None:
        entries = len(self.slopes)
        if entries != len(self.intercepts) or entries != len(self.breakpoints) + 1:
            raise ConfigError("a table of N entries has N slopes, N intercepts and N - 1 breakpoints.")
        if not all(bool(part.isfinite().all()) for part in (self.breakpoints, self.slopes, self.intercepts)):
            raise ConfigError(f"a table of {entries} entries contains NaN or infinity.")
        if bool((self.breakpoints.diff() < 0).any()):
            raise ConfigError("the breakpoints of a table must be in ascending order.")

    @classmethod
    def of_relu_network(
        cls, weight: Tensor, bias: Tensor, output_weight: Tensor, output_bias: float = 0.0
    ) -> PiecewiseLinear:
        """Convert sum_j output_weight[j] * relu(weight[j] * x + bias[j]) + output_bias exactly, unit by unit.

        A unit with a positive weight is active to the right of its breakpoint, one with a negative weight to the left:
        prefix sums over the former, suffix sums over the latter. A unit of weight 0 is a constant, which has no
        breakpoint: its entry repeats the last one.
        """
        weight, bias, output_weight = weight.double(), bias.double(), output_weight.double()
        constant = weight == 0
        offset = float(output_bias) + float((output_weight * bias.relu())[constant].sum())
        position = torch.where(constant, torch.inf, -bias / torch.where(constant, 1.0, weight))
        order = position.argsort(stable=True)
        position, active = position[order], ~constant[order]
        slope = torch.where(active, (output_weight * weight)[order], 0.0)
        intercept = torch.where(active, (output_weight * bias)[order], 0.0)
        rising = weight[order] > 0
        if bool(active.any()):
            position = torch.where(active, position, position[active][-1])
        else:
            position = torch.zeros_like(position)
        slopes, intercepts = (
            _prefix_sums(torch.where(rising, part, 0.0)) + _suffix_sums(torch.where(rising, 0.0, part))
            for part in (slope, intercept)
        )
        return cls(position, slopes, intercepts + offset)

    @classmethod
    def uniform(cls, function: Function, low: float, high: float, entries: int) -> PiecewiseLinear:
        """Interpolate a function linearly on segments of equal length."""
        knots = torch.linspace(low, high, entries + 1, dtype=torch.float64)
        values = function(knots)
        slopes = values.diff() / knots.diff()
        return cls(knots[1:-1], slopes, values[:-1] - slopes * knots[:-1])

    @property
    def entries(self) -> int:
        return len(self.slopes)

    def __call__(self, x: Tensor) -> Tensor:
        """Look up values of any shape, computed in the table's dtype."""
        x = x.to(self.slopes.dtype)
        entry = torch.searchsorted(self.breakpoints, x.contiguous(), right=True)
        return self.slopes[entry] * x + self.intercepts[entry]

    def to(self, dtype: torch.dtype) -> PiecewiseLinear:
        """Return the table in another dtype, such as float16. Rounding keeps the breakpoints in order."""
        return PiecewiseLinear(self.breakpoints.to(dtype), self.slopes.to(dtype), self.intercepts.to(dtype))

    def pin(self, left: Line | None = None, right: Line | None = None) -> PiecewiseLinear:
        """Replace the outermost segments by the asymptotes of the function, since they extend forever.

        An outermost breakpoint moves to where its inner neighbor meets the asymptote, if that lies before the next
        breakpoint, so that the table stays continuous.
        """
        breakpoints, slopes, intercepts = self.breakpoints.clone(), self.slopes.clone(), self.intercepts.clone()
        for end, inner, limit, line in ((0, 1, _at(breakpoints, 1), left), (-1, -2, _at(breakpoints, -2), right)):
            if line is None or not len(breakpoints):
                continue
            slopes[end], intercepts[end] = line
            if slopes[inner] != line[0]:
                meeting = (line[1] - float(intercepts[inner])) / (float(slopes[inner]) - line[0])
                if limit is None or (meeting <= limit if end == 0 else meeting >= limit):
                    breakpoints[end] = meeting
        return PiecewiseLinear(breakpoints, slopes, intercepts)

    def to_integer(self, input_scale: float, bound: int, *, output_bits: int | None = None) -> IntegerTable:
        """Convert to integers for inputs x = input_scale * q with |q| at most `bound`.

        A breakpoint is rounded up, so that an integer selects the same entry as x does. The results are in units of
        2^-output_bits and may need int64; by default the scale of the slopes is the finest power of two that keeps
        every result in int32.
        """
        table = self.to(torch.float64)
        breakpoints = (table.breakpoints / input_scale).ceil().clamp(-bound, bound + 1)  # bound + 1 is never reached
        if output_bits is None:
            slope_scale = table._finest_slope_scale(breakpoints, input_scale, bound)
        else:
            slope_scale = 2.0**-output_bits / input_scale
        slopes = (table.slopes / slope_scale).round()
        intercepts = (table.intercepts / (slope_scale * input_scale)).round()
        largest = bound * float(slopes.abs().max()) + float(intercepts.abs().max())
        coarse = output_bits is None and slope_scale > 1
        if coarse or float(slopes.abs().max()) >= 2**31 or bound >= 2**31 - 1 or largest >= 2.0**62:
            raise ConfigError(
                f"a table on inputs of scale {input_scale:g} up to {bound} overflows its integers; "
                "requantize its input to 16 bits."
            )
        return IntegerTable(
            breakpoints.to(torch.int32), slopes.to(torch.int32), intercepts.to(torch.int64), slope_scale * input_scale
        )

    def _finest_slope_scale(self, breakpoints: Tensor, input_scale: float, bound: int) -> float:
        """Return the power of two for which slopes[k] * q and slopes[k] * q + intercepts[k] fit into int32."""
        ends = torch.cat((torch.tensor([-bound]), breakpoints, torch.tensor([bound]))).clamp(-bound, bound)
        products = torch.stack((self.slopes * ends[:-1], self.slopes * ends[1:]))
        results = products + self.intercepts / input_scale
        largest = max(float(products.abs().max()), float(results.abs().max()), 2.0**-MAX_SLOPE_BITS)
        # The rounding of slope and intercept moves a result by at most (bound + 1) / 2.
        bits = min(MAX_SLOPE_BITS, math.floor(math.log2(max(2**31 - 2 - bound, 1) / largest)))
        return 2.0**-bits


@dataclass(frozen=True)
class InputScaling:
    """Look up small inputs of a power function (1/x, 1/sqrt(x)) on the range that its table was made for.

    Below `threshold` the input is multiplied by c = 2^shift, and the result divided by c^exponent = f(c x) / f(x).
    """

    exponent: float  # -1 for 1/x, -0.5 for 1/sqrt(x)
    threshold: float = 1.0
    shift: int = 10

    def __call__(self, table: PiecewiseLinear, x: Tensor) -> Tensor:
        small = x < self.threshold
        values = table(torch.where(small, x * 2.0**self.shift, x))
        return torch.where(small, values * 2.0 ** (-self.shift * self.exponent), values)


def _prefix_sums(units: Tensor) -> Tensor:
    """Return the sum over the first k units for k = 0..N-1."""
    return torch.cat((units.new_zeros(1), units.cumsum(0)))


def _suffix_sums(units: Tensor) -> Tensor:
    """Return the sum over all but the first k units for k = 0..N-1."""
    return torch.cat((units.flip(0).cumsum(0).flip(0), units.new_zeros(1)))


def _at(breakpoints: Tensor, index: int) -> float | None:
    return float(breakpoints[index]) if len(breakpoints) > 1 else None
