"""How an emulated GEMM adds its products, as all of its kernels are told."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.numerics.float_format import FloatFormat, Rounding


@dataclass(frozen=True)
class Accumulation:
    """Accumulator format, chunks and rounding. `chunk_size` is the inner dimension if there are no chunks."""

    format: FloatFormat
    chunk_size: int
    rounding: Rounding
    saturate: bool
    seed: int  # of stochastic rounding
    operands: FloatFormat | None  # format of both operands, if known

    @property
    def overflow(self) -> float:
        """What a finite sum beyond the largest value becomes."""
        return self.format.max_value if self.saturate or self.rounding == "truncate" else self.format.overflow_value

    @property
    def infinite(self) -> float:
        """What an infinite sum becomes."""
        return self.format.max_value if self.saturate else self.format.overflow_value

    @property
    def float32_is_exact(self) -> bool:
        """Whether sums may be computed in float32 before they are rounded.

        To nearest, rounding twice equals rounding once if float32 has at least 2p + 2 bits for terms and results of p
        bits (Figueroa, 1995): p = 11. Products must not be wider than the accumulator: a wider one can be a tie. The
        exponents must neither overflow nor underflow float32, and sums below the smallest normal value of the
        accumulator must be exact.
        """
        if self.operands is None or self.rounding != "nearest":
            return False
        product_bits, accumulator_bits = 2 * (self.operands.mantissa_bits + 1), self.format.mantissa_bits + 1
        lowest = 2 * (self.operands.min_exponent - self.operands.mantissa_bits)  # exponent of a product's last bit
        largest = max(self.operands.max_value**2, self.format.max_value)
        in_range = lowest >= max(-100, self.format.min_exponent - 20) and largest < 2.0**80
        return product_bits <= accumulator_bits <= 11 and in_range
