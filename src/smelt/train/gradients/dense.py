"""No compression: every element is sent, as float32 or rounded to 16 or 8 bits; the baseline that `auto` can choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from smelt.config import renamed
from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.encoding import WIRE_DTYPES, all_reduce_values
from smelt.train.gradients.gradient_views import BucketGradient
from smelt.train.gradients.index_exchange import StatusFlags
from smelt.train.gradients.reducer import Reducer


@dataclass(frozen=True)
class Dense(Compressor):
    """Send everything in every step; the residual keeps the rounding error."""

    name: ClassVar[str] = "dense"
    paper: ClassVar[str] = "none: the baseline of every compressor"

    wire_dtype: str = renamed("values", default="float32")  # or float16, bfloat16, int8

    def __post_init__(self) -> None:
        if self.wire_dtype not in WIRE_DTYPES:
            raise ConfigError(f"dense: wire_dtype is one of {', '.join(WIRE_DTYPES)}, not {self.wire_dtype!r}.")

    def target_count(self, numel: int) -> float:
        return numel


class DenseReducer(Reducer):
    """All-reduce the whole bucket."""

    def _reduce(
        self, gradient: BucketGradient, flags: StatusFlags, divisor: float
    ) -> tuple[BucketGradient, Tensor] | None:
        assert isinstance(self.compressor, Dense)
        gathered = self.comm.all_gather(flags.encode(self.residual.device), "counts")
        if not flags.all_finite(gathered):
            return None
        accumulated, mask = self._begin(gradient).accumulate(), flags.used_mask(gathered, self.layout)
        sent = accumulated if mask is None else accumulated * mask[:-1]
        summed, error = all_reduce_values(sent, self.comm, self.compressor.wire_dtype)
        self.residual.copy_(error if mask is None else error + accumulated - sent)
        self.traffic = self._account(self.layout.numel, 0, 0)
        return gradient, summed.div_(divisor)

    def record_external_step(self, num_bytes: int) -> None:
        """Count a step in which DDP itself has sent the bucket and this rank received `num_bytes`."""
        self.iteration += 1
        self.comm.bytes_received["values"] += num_bytes
        self.traffic = self._account(self.layout.numel, 0, 0)
