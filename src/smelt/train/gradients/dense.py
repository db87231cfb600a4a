"""No compression, in the frame: all elements travel, as float32 or in 16 bits, so that `auto` can choose it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.control_flags import Marks
from smelt.train.gradients.gradient_views import Given
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.values import VALUES, sum_values


@dataclass(frozen=True)
class Dense(Compressor):
    """Everything is sent in every step; what rounding loses stays in the residual."""

    name: ClassVar[str] = "dense"
    paper: ClassVar[str] = "none: what every compressor is measured against"

    values: str = "float32"  # or float16, bfloat16, int8

    def __post_init__(self) -> None:
        if self.values not in VALUES:
            raise ConfigError(f"dense: values is one of {', '.join(VALUES)}, not {self.values!r}.")

    def target(self, elements: int) -> float:
        return elements


class DenseReducer(Reducer):
    """A reducer that sends its whole vector."""

    def _reduce(self, given: Given, marks: Marks, divisor: float) -> tuple[Given, Tensor] | None:
        assert isinstance(self.compressor, Dense)
        gathered = self.workers.gather(marks.encode(self.residual.device), "counts")
        if not marks.all_finite(gathered):
            return None
        waiting, allowed = self._open(given).add(), marks.allowed(gathered, self.layout)
        sent = waiting if allowed is None else waiting * allowed[:-1]
        summed, error = sum_values(sent, self.workers, self.compressor.values)
        self.residual.copy_(error if allowed is None else error + waiting - sent)
        self.traffic = self._account(self.layout.size, 0, 0)
        return given, summed.div_(divisor)

    def pass_by(self, size: int) -> None:
        """Count a step in which somebody else has sent the vector, and so many bytes arrived."""
        self.number += 1
        self.workers.arrived["values"] += size
        self.traffic = self._account(self.layout.size, 0, 0)
