"""PowerSGD in the frame: PyTorch's communication hook is handed our flat vector as if it were a bucket of DDP.

So its state belongs to a vector that never changes, while buckets of DDP do, and can be saved and resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from smelt.errors import ConfigError
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compressors.powersgd import PowerSGD
from smelt.train.gradients.control_flags import Marks
from smelt.train.gradients.gradient_views import Given, Pieces
from smelt.train.gradients.layout import Layout
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import Settings


class LowRankReducer(Reducer):
    """A reducer whose middle is PyTorch's."""

    def __init__(
        self,
        compressor: PowerSGD,
        layout: Layout,
        workers: Workers,
        settings: Settings | None = None,
        *,
        device: torch.device | str = "cpu",
        learning_rate: Callable[[], float] | None = None,
        rollback: bool = False,
    ) -> None:
        settings = settings or Settings()
        if not distributed.is_initialized():
            raise ConfigError("powersgd works between workers; start them with torchrun.")
        if settings != Settings(check=settings.check):
            raise ConfigError("powersgd is PyTorch's own and takes none of the settings but check.")
        super().__init__(compressor, layout, workers, settings, device=device, rollback=rollback)
        self._power = PowerSGDState(
            workers.group,
            matrix_approximation_rank=compressor.rank,
            start_powerSGD_iter=compressor.plain,
            min_compression_rate=compressor.least,
            orthogonalization_epsilon=1e-8,
            random_seed=compressor.seed,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The random numbers that PyTorch draws are used up when its matrices are first made, so they need no place."""
        factors = {"low_rank.p": self._power.p_memory_dict, "low_rank.q": self._power.q_memory_dict}
        return {**super().tensors(), **{name: memory[0] for name, memory in factors.items() if 0 in memory}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        super().restore(tensors)
        self._power.iter = self.number
        for name, memory in (("p", self._power.p_memory_dict), ("q", self._power.q_memory_dict)):
            memory.clear()
            if f"low_rank.{name}" in tensors:
                memory[0] = tensors[f"low_rank.{name}"].to(self.residual.device, copy=True)

    def _reduce(self, given: Given, marks: Marks, divisor: float) -> tuple[Given, Tensor] | None:
        if not marks.all_finite(self.workers.gather(marks.encode(self.residual.device), "counts")):
            return None
        sent_before = self._power.total_numel_after_compression
        self._power.error_dict[0] = self.residual.clone()
        vector = given.flat() if isinstance(given, Pieces) else given.clone()
        bucket: Any = _Vector(self.layout, vector)
        mean: Any = powerSGD_hook(self._power, bucket).wait()
        mean = mean[0] if isinstance(mean, list) else mean
        plain = self._power.total_numel_after_compression == sent_before
        if not plain:
            self.residual.copy_(self._power.error_dict[0])
        sent = self.layout.size if plain else self._power.total_numel_after_compression - sent_before
        self.workers.arrived["values"] += 2 * (self.workers.size - 1) * 4 * sent // self.workers.size
        self.traffic = self._account(sent, 0, 0)
        return given, mean * (self.workers.size / divisor)


class _Vector:
    """What PyTorch's hook asks of a bucket."""

    def __init__(self, layout: Layout, flat: Tensor) -> None:
        self._layout, self._flat = layout, flat

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return [view.view(piece.shape or (1,)) for piece, view in self._layout.views(self._flat)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True
