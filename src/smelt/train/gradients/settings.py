"""Settings of gradient compression that do not depend on the compressor."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.config import renamed
from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Compressor, GradientEncoder, Sparsifier
from smelt.train.gradients.encoding import WIRE_DTYPES

ERROR_FEEDBACK = ("gradient", "lr_scaled")
OLD_ERROR_FEEDBACK = {"code": "gradient", "paper": "lr_scaled"}
LOCAL = "local"  # as many ranks per node as torchrun has started on each machine
_FIXED_CAPACITY_MODES = ("exclusive", "union")
_MIN_CAPACITY = 1.2  # a count that is cut off at its target cannot show that it was exceeded


@dataclass(frozen=True)
class CompressionSettings:
    """Error feedback, the encoding of values, the node topology, and checks."""

    # "gradient": the residual holds gradients; "lr_scaled": gradients times the learning rate of their step
    error_feedback: str = renamed("form", default="gradient", renamed_values=OLD_ERROR_FEEDBACK)
    # low-pass filter of the residual (ScaleCom): 1 is plain error feedback, about 0.1 suits large batches
    residual_momentum: float = renamed("beta", default=1.0)
    # or float16, bfloat16, int8; the residual keeps the rounding error
    wire_dtype: str = renamed("values", default="float32")
    # capacity for indices as a multiple of the target, so that no step synchronizes; None: exchange counts first
    fixed_capacity: float | None = renamed("slots", default=None)
    # or "local": dense inside a node, compressed between nodes; None: no hierarchy
    ranks_per_node: int | str | None = renamed("node", default=None)
    # debug: compare what was applied and the residuals with the gradients after every step
    check_conservation: bool = renamed("check", default=False)

    def __post_init__(self) -> None:
        for key, options in (("error_feedback", ERROR_FEEDBACK), ("wire_dtype", WIRE_DTYPES)):
            if getattr(self, key) not in options:
                raise ConfigError(f"{key} is one of {', '.join(options)}, not {getattr(self, key)!r}.")
        if not 0 < self.residual_momentum <= 1:
            raise ConfigError(
                f"residual_momentum is {self.residual_momentum:g}; it must be above 0 and at most 1 (no filter)."
            )
        if self.fixed_capacity is not None and not self.fixed_capacity >= 1:
            raise ConfigError(f"fixed_capacity is {self.fixed_capacity:g}; it must be at least 1, or None.")
        ranks = self.ranks_per_node
        if ranks is not None and ranks != LOCAL and not (isinstance(ranks, int) and ranks >= 2):
            raise ConfigError(f'ranks_per_node is {ranks!r}; it must be a number of ranks, at least 2, or "local".')

    def require_compatible(self, compressor: Compressor, *, has_learning_rate: bool) -> None:
        """Raise ConfigError if the settings do not fit the compressor."""
        if self.error_feedback == "lr_scaled" and not has_learning_rate:
            raise ConfigError("error_feedback='lr_scaled' needs the learning rate; pass the optimizer too.")
        if isinstance(compressor, GradientEncoder) and self.wire_dtype != "float32":
            raise ConfigError(f"{compressor.name} has its own encoding of values; leave wire_dtype at float32.")
        if self.fixed_capacity is not None:
            self._require_fixed_capacity(compressor, self.fixed_capacity)

    def _require_fixed_capacity(self, compressor: Compressor, capacity: float) -> None:
        name, mode = compressor.name, compressor.exchange_mode if isinstance(compressor, Sparsifier) else ""
        if mode not in _FIXED_CAPACITY_MODES:
            raise ConfigError(f"{name} does not support a fixed capacity; leave fixed_capacity at None.")
        if mode == "union" and self.wire_dtype != "float32":  # an element that is sent twice would be rounded twice
            raise ConfigError(
                f"the ranks of {name} may select the same elements; with fixed_capacity use wire_dtype='float32'."
            )
        if mode == "exclusive" and capacity < _MIN_CAPACITY:
            raise ConfigError(
                f"fixed_capacity is {capacity:g}; {name} adjusts its threshold by the counts and needs at least "
                f"{_MIN_CAPACITY:g}."
            )
