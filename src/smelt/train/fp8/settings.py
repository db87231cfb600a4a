"""Settings of FP8 training: of today's scaled GEMMs, and of the recipe with chunk-based accumulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from smelt.config import suggest
from smelt.errors import ConfigError

SCALINGS = ("tensorwise", "delayed", "rowwise", "blockwise")
MAX_ACCUMULATOR_BITS = 23


@dataclass(frozen=True)
class Fp8Settings:
    """Scaled FP8 GEMMs (`precision: fp8`)."""

    # tensorwise: one scale per tensor, from its own largest magnitude; delayed: from those of the last steps; rowwise:
    # one scale per row; blockwise: 1x128 for activations and gradients, 128x128 for weights (DeepSeek-V3)
    scaling: str = "tensorwise"
    amax_history_len: int = 16  # steps, of delayed
    convolutions: bool = False  # 2-d convolutions too, as GEMMs of unfolded images
    exclude: list[str] = field(default_factory=list)  # layers whose name contains one of these stay in bf16

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ConfigError(f"there is no FP8 scaling {self.scaling!r:.80}{suggest(self.scaling, SCALINGS)}")
        if self.amax_history_len < 1:
            raise ConfigError(f"amax_history_len is {self.amax_history_len}; it must be at least 1.")


@dataclass(frozen=True)
class AccumulatorBits:
    """Mantissa bits of the accumulator of each GEMM of a layer; None: as many as VRR predicts for its length."""

    forward: int | None = 9
    backward: int | None = 9  # the gradient of the inputs
    gradient: int | None = 9  # the gradient of the weight

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "gradient"):
            bits = getattr(self, name)
            if bits is not None and not 1 <= bits <= MAX_ACCUMULATOR_BITS:
                raise ConfigError(
                    f"accumulator_bits.{name} is {bits}; an accumulator has 1 to {MAX_ACCUMULATOR_BITS} mantissa bits."
                )


@dataclass(frozen=True)
class ChunkedSettings:
    """FP8 GEMMs with 16-bit chunk-based accumulation and 16-bit weight updates (`precision: fp8-chunked`)."""

    chunk_size: int | None = 64  # products that are added on their own first; None: no chunks
    accumulator_bits: AccumulatorBits = field(default_factory=AccumulatorBits)
    bits_below_prediction: int = 0  # fewer bits than predicted, where accumulator_bits is None
    stochastic_rounding: bool = True  # of weight updates; false: to nearest
    loss_scale: float = 1000.0

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ConfigError(f"chunk_size is {self.chunk_size}; it must be at least 1, or null for no chunks.")
        if self.bits_below_prediction < 0:
            raise ConfigError(f"bits_below_prediction is {self.bits_below_prediction}; it must not be negative.")
        if not self.loss_scale > 0:
            raise ConfigError(f"loss_scale is {self.loss_scale:g}; it must be above 0.")
