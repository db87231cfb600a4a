"""PowerSGD: matrices as products of two thin ones, by one step of warm-started power iteration.

PyTorch's own communication hook does the work. It is passed our flat bucket as if it were a bucket of DDP, so that its
state belongs to a bucket that never changes, as DDP's do, and can be saved and resumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as distributed
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from smelt.config import renamed
from smelt.errors import ConfigError
from smelt.train.gradients.compressor import COMPRESSORS, Compressor
from smelt.train.gradients.gradient_views import BucketGradient, GradientViews
from smelt.train.gradients.index_exchange import StatusFlags
from smelt.train.gradients.layout import BucketLayout
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import CompressionSettings


@COMPRESSORS.register(
    "powersgd",
    paper=(
        "Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS 2019 "
        "(arXiv 1905.13727)"
    ),
)
@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Send a low-rank approximation of every matrix: the best loss per byte in our runs at high compression."""

    rank: int = 1
    warmup_steps: int = renamed("plain", default=10)  # send everything; at least 2
    min_compression_rate: float = renamed("least", default=2.0)  # else a matrix is sent dense
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"powersgd: rank is {self.rank}; it must be at least 1.")
        if self.warmup_steps < 2:
            raise ConfigError(
                f"powersgd: warmup_steps is {self.warmup_steps}; PyTorch's implementation needs at least 2."
            )
        if not self.min_compression_rate >= 1:
            raise ConfigError(
                f"powersgd: min_compression_rate is {self.min_compression_rate:g}; it must be at least 1."
            )

    def target_count(self, numel: int) -> float:
        return numel


class PowerSGDReducer(Reducer):
    """A reducer that calls PyTorch's PowerSGD hook."""

    compressor: PowerSGD

    def _check_settings(self) -> None:
        if not distributed.is_initialized():
            raise ConfigError("powersgd needs torch.distributed; start the ranks with torchrun.")
        if self.settings != CompressionSettings(check_conservation=self.settings.check_conservation):
            raise ConfigError("powersgd is PyTorch's own and supports no setting except check_conservation.")

    @cached_property
    def _hook_state(self) -> PowerSGDState:
        compressor = self.compressor
        return PowerSGDState(
            self.comm.group,
            matrix_approximation_rank=compressor.rank,
            start_powerSGD_iter=compressor.warmup_steps,
            min_compression_rate=compressor.min_compression_rate,
            orthogonalization_epsilon=1e-8,
            random_seed=compressor.seed,
        )

    def tensors(self) -> dict[str, Tensor]:
        """PyTorch uses its random numbers only to create P and Q, so they need not be saved."""
        factors = {"low_rank.p": self._hook_state.p_memory_dict, "low_rank.q": self._hook_state.q_memory_dict}
        return {**super().tensors(), **{name: memory[0] for name, memory in factors.items() if 0 in memory}}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        super().restore(tensors)
        self._hook_state.iter = self.iteration
        for name, memory in (("p", self._hook_state.p_memory_dict), ("q", self._hook_state.q_memory_dict)):
            memory.clear()
            if f"low_rank.{name}" in tensors:
                memory[0] = tensors[f"low_rank.{name}"].to(self.residual.device, copy=True)

    def _reduce(
        self, gradient: BucketGradient, flags: StatusFlags, divisor: float
    ) -> tuple[BucketGradient, Tensor] | None:
        if not flags.all_finite(self.comm.all_gather(flags.encode(self.residual.device), "counts")):
            return None
        sent_before = self._hook_state.total_numel_after_compression
        self._hook_state.error_dict[0] = self.residual.clone()
        flat = gradient.flatten() if isinstance(gradient, GradientViews) else gradient.clone()
        bucket: Any = _HookBucket(self.layout, flat)
        mean: Any = powerSGD_hook(self._hook_state, bucket).wait()
        mean = mean[0] if isinstance(mean, list) else mean
        in_warmup = self._hook_state.total_numel_after_compression == sent_before
        if not in_warmup:
            self.residual.copy_(self._hook_state.error_dict[0])
        sent = self.layout.numel if in_warmup else self._hook_state.total_numel_after_compression - sent_before
        self.comm.bytes_received["values"] += 2 * (self.comm.world_size - 1) * 4 * sent // self.comm.world_size
        self.traffic = self._account(sent, 0, 0)
        return gradient, mean * (self.comm.world_size / divisor)


class _HookBucket:
    """The part of DDP's GradBucket that PyTorch's hook uses."""

    def __init__(self, layout: BucketLayout, flat: Tensor) -> None:
        self._layout, self._flat = layout, flat

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return [view.view(part.shape or (1,)) for part, view in self._layout.views(self._flat)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True
