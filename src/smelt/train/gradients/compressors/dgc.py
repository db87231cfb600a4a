"""Deep Gradient Compression: top-k with momentum correction, momentum factor masking, clipping and warmup."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from smelt.config import renamed
from smelt.errors import ConfigError
from smelt.train.gradients.compressor import (
    COMPRESSORS,
    CompressionStep,
    CompressorState,
    IndependentSparsifier,
    SelectedIndices,
    require_positive,
    topk_count,
)
from smelt.train.gradients.layout import BucketLayout

_SAMPLE_SHARE = 0.01  # of a tensor
_MAX_TRIES = 10  # changes of a threshold
_MIN_SHARE = 0.8  # of the target: below it the threshold falls by this factor


@COMPRESSORS.register("dgc", paper="Lin et al., Deep Gradient Compression, ICLR 2018 (arXiv 1712.01887)")
@dataclass(frozen=True)
class DGC(IndependentSparsifier):
    """Top-k for training with SGD and momentum, which the compressor itself applies.

    u = m u + g, v += u (Nesterov: u = m (u + g), v += u + g); select by |v| in each tensor of two or more dimensions,
    send vectors dense; u and v become zero where sent. The optimizer must have no momentum of its own. What is
    conserved is the velocity, which with momentum 0 is the gradient."""

    exchange_mode: str = renamed("agreement", default="own")
    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True  # clear the velocity where it was sent
    # maximum gradient norm over all ranks; each rank is clipped to clip_norm / sqrt(n)
    clip_norm: float | None = renamed("clip", default=None)
    # epochs in which the density falls to its target
    warmup_epochs: int = renamed("warm_up", default=4)
    steps_per_epoch: int = renamed("epoch", default=0)  # 0: no warmup
    seed: int = 0  # of the samples

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"dgc: momentum is {self.momentum:g}; it must be at least 0 and below 1.")
        if self.clip_norm is not None:
            require_positive(self.name, "clip_norm", self.clip_norm)
        if self.warmup_epochs < 0 or self.steps_per_epoch < 0:
            raise ConfigError("dgc: warmup_epochs and steps_per_epoch must not be negative.")

    def check_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        if not self.momentum:
            return
        if optimizer is None:
            warnings.warn(
                "dgc applies momentum itself, so the optimizer must have none; pass optimizer= to have it checked.",
                UserWarning,
                stacklevel=3,
            )
        elif any(group.get("momentum") or group.get("betas", (0,))[0] for group in optimizer.param_groups):
            raise ConfigError(
                "dgc applies momentum itself; use SGD with momentum 0, or dgc with momentum 0 and any other optimizer."
            )

    def init_state(self, layout: BucketLayout, world_size: int) -> CompressorState:
        return {"velocity": torch.zeros(layout.numel)}

    def correct_gradient(self, step: CompressionStep) -> Tensor:
        gradient, velocity = step.flat_gradient, step.state["velocity"].to(step.residual.device)
        if self.clip_norm is not None:
            norm = torch.linalg.vector_norm(gradient)
            limit = self.clip_norm / step.comm.world_size**0.5
            gradient = gradient * (limit / norm.clamp_min(1e-12)).clamp_max(1.0)
        if self.nesterov:
            velocity = step.state["velocity"] = self.momentum * (velocity + gradient)
            return velocity + gradient
        velocity = step.state["velocity"] = self.momentum * velocity + gradient
        return velocity

    def select(self, step: CompressionStep) -> SelectedIndices:
        accumulated = step.accumulate()
        density = self.density_at(step.iteration)
        sparse, dense = [], []
        for part, values in step.layout.views(accumulated):
            if len(part.shape) > 1 and part.numel:
                sparse.append(self._select_largest(values, density, step) + part.start)
            else:
                dense.append(torch.arange(part.start, part.stop, device=accumulated.device))
        empty = accumulated.new_empty(0, dtype=torch.int64)
        return SelectedIndices(torch.cat([empty, *sparse]), torch.cat([empty, *dense]))

    def on_sent(self, step: CompressionStep, sent: Tensor) -> None:
        if self.masking:
            is_sparse = [len(part.shape) > 1 for part in step.layout.slices]
            sizes = torch.tensor([part.numel for part in step.layout.slices], device=sent.device)
            masked = torch.repeat_interleave(torch.tensor(is_sparse, device=sent.device), sizes)
            velocity = torch.cat([step.state["velocity"], step.residual.new_zeros(1)])  # padding points past its end
            velocity[sent[torch.cat([masked, masked.new_zeros(1)])[sent]]] = 0.0
            step.state["velocity"] = velocity[:-1]

    def density_at(self, iteration: int) -> float:
        """d^((e + 1) / (E + 1)) in epoch e of E: 0.25, 0.063, 0.016, 0.004, then 0.001."""
        epoch = iteration // self.steps_per_epoch if self.steps_per_epoch else self.warmup_epochs
        return self.density ** ((min(epoch, self.warmup_epochs) + 1) / (self.warmup_epochs + 1))

    def _select_largest(self, values: Tensor, density: float, step: CompressionStep) -> Tensor:
        """Return about the k largest elements, never more: [count] int64, ascending"""
        magnitudes, target = values.abs(), topk_count(density, len(values))
        if target == len(values):
            return torch.arange(target, device=values.device)
        threshold = self._sample_threshold(magnitudes, density, step)
        for _ in range(_MAX_TRIES):
            indices = torch.nonzero(magnitudes >= threshold).flatten()
            if len(indices) >= _MIN_SHARE * target:
                break
            threshold = threshold * _MIN_SHARE
        if len(indices) > target:
            indices = indices[magnitudes[indices].topk(target, sorted=False).indices].sort().values
        return indices

    def _sample_threshold(self, magnitudes: Tensor, density: float, step: CompressionStep) -> Tensor:
        """Return the k-th largest of a sample: every stride-th element from a random one on."""
        size = min(max(int(_SAMPLE_SHARE * len(magnitudes)), ceil(2 / density)), len(magnitudes))
        stride = len(magnitudes) // size
        if stride > 32:
            stride = stride // 32 * 32 + 1
        generator = step.generator(self.seed, per_rank=True)
        first = int(torch.randint(stride, (1,), generator=generator, device=magnitudes.device))
        sample = magnitudes[first::stride]
        return sample.topk(min(ceil(len(sample) * density), len(sample))).values[-1]
