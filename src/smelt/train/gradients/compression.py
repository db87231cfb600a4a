"""Compressed gradients of a model: buckets with one reducer each, filled tensor by tensor during backward.

Buckets are made once from the list of parameters, last parameter first, since its gradient is ready first. They do not
follow DDP's buckets, which change after the first iteration and start anew in every run: so no state ever moves, and a
resumed run finds its own. A bucket is reduced when all its gradients have been added and all buckets before it are
reduced, which is the same order on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.gradients.bucket import GradientBucket
from smelt.train.gradients.comm import Comm, Traffic
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors.powersgd import PowerSGD, PowerSGDReducer
from smelt.train.gradients.dense import Dense, DenseReducer
from smelt.train.gradients.hierarchy import NodeTopology
from smelt.train.gradients.layout import BucketLayout
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import CompressionSettings

NamedParameter = tuple[str, Tensor]


class GradientCompression(ABC):
    """The reducers of one model: what a checkpoint saves, however gradients are collected."""

    compressor: Compressor
    settings: CompressionSettings
    comm: Comm  # all ranks that keep a state each
    shards: int = 1  # ranks that hold different parts of one model

    @property
    @abstractmethod
    def reducers(self) -> list[Reducer]:
        """In the same order on every rank."""

    @property
    def layouts(self) -> list[BucketLayout]:
        """Layouts of complete buckets, equal on every rank; a reducer may hold a shard of one."""
        return [reducer.layout for reducer in self.reducers]

    @property
    def num_steps(self) -> int:
        """Number of steps that were applied."""
        return self.reducers[0].iteration

    @property
    def traffic(self) -> Traffic:
        """Traffic of the last step, on this rank."""
        return sum((reducer.traffic for reducer in self.reducers), Traffic())

    @property
    def total_traffic(self) -> Traffic:
        """Traffic of all steps, on this rank."""
        return sum((reducer.total_traffic for reducer in self.reducers), Traffic())

    def resolve_deferred(self) -> None:
        """Roll back the last step if it was not finite on some rank, as the gradient scaler skipped it too."""
        finite = [reducer.resolve_deferred() for reducer in self.reducers]
        if not all(finite):
            for reducer in self.reducers:
                reducer.rollback()


class BucketedCompression(GradientCompression):
    """What `compress_gradients` returns: the state of compression on this rank, and its traffic."""

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        compressor: Compressor,
        comm: Comm,
        settings: CompressionSettings | None = None,
        *,
        bucket_cap_mb: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        track_unused: bool = False,
    ) -> None:
        compressor.check_optimizer(optimizer)
        self.compressor, self.comm, self.settings = compressor, comm, settings or CompressionSettings()
        self._scaler, self._track_unused = scaler, track_unused
        ranks_per_node = self.settings.ranks_per_node
        self.nodes = None if ranks_per_node is None else NodeTopology.create(comm, ranks_per_node)
        self.shards = 1 if self.nodes is None else self.nodes.intra_node.world_size
        learning_rate = None if optimizer is None else _learning_rate_getter(optimizer)
        self.buckets = []
        for group in _split_into_buckets(list(parameters), bucket_cap_mb):
            layout, device = BucketLayout.from_tensors(group), group[0][1].device
            if self.nodes is not None:
                comm.require_equal(str(layout), "model")
            own = layout if self.nodes is None else self.nodes.shard(layout)
            reducer = self.make_reducer(own, device, learning_rate, scaler is not None)
            self.buckets.append(GradientBucket(device, layout, reducer, self.nodes))
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self._next = 0  # index of the bucket to reduce next
        self.reduce_context: Callable[[], AbstractContextManager[None]] = nullcontext  # entered for every reduction

    @property
    def reducers(self) -> list[Reducer]:
        return [bucket.reducer for bucket in self.buckets]

    @property
    def layouts(self) -> list[BucketLayout]:
        return [bucket.layout for bucket in self.buckets]

    @property
    def reduction_comm(self) -> Comm:
        """The ranks that exchange compressed gradients: all of them, or one per node."""
        return self.comm if self.nodes is None else self.nodes.inter_node

    @property
    def traffic(self) -> Traffic:
        return super().traffic + Traffic(intra_node=sum(bucket.intra_node_bytes for bucket in self.buckets))

    @property
    def total_traffic(self) -> Traffic:
        intra_node = sum(bucket.total_intra_node_bytes for bucket in self.buckets)
        return super().total_traffic + Traffic(intra_node=intra_node)

    @property
    def uses_plain_ddp(self) -> bool:
        """Whether DDP should all-reduce its buckets itself, without compression."""
        return False

    def make_reducer(
        self,
        layout: BucketLayout,
        device: torch.device,
        learning_rate: Callable[[], float] | None,
        allow_rollback: bool,
    ) -> Reducer:
        """Return the reducer of one bucket."""
        settings = replace(self.settings, ranks_per_node=None)
        comm = self.reduction_comm
        return build_reducer(self.compressor, layout, comm, settings, device, learning_rate, allow_rollback)

    def add(self, name: str, gradient: Tensor) -> bool:
        """Add a gradient, which must not change until `write_back`; return whether buckets were reduced."""
        if not self._next and not any(bucket.received for bucket in self.buckets):
            self.resolve_deferred()
        self._bucket_of[name].add(name, gradient, stable=True)
        before = self._next
        while self._next < len(self.buckets) and self.buckets[self._next].complete:
            with self.reduce_context():
                self.reduce_bucket(self.buckets[self._next])
            self._next += 1
        return self._next > before

    def reduce_bucket(self, bucket: GradientBucket) -> None:
        """Reduce a bucket that is complete."""
        bucket.reduce(self._loss_scale(), self._track_unused)

    def is_reduced(self, name: str) -> bool:
        """Return whether the mean of this gradient is known."""
        return self._bucket_of[name].reduced

    def write_back(self, name: str, gradient: Tensor) -> None:
        """Overwrite a gradient with its mean over all ranks."""
        self._bucket_of[name].write_back(name, gradient)
        if self._next == len(self.buckets) and not any(other.reduced for other in self.buckets):
            self._next = 0

    def reset(self) -> None:
        """Drop the gradients of a step that ended in an error."""
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def _loss_scale(self) -> Tensor | None:
        """Return the scale without a sync."""
        return None if self._scaler is None else self._scaler.scale(torch.ones(1, device=self.buckets[0].device))


def build_reducer(
    compressor: Compressor,
    layout: BucketLayout,
    comm: Comm,
    settings: CompressionSettings,
    device: torch.device,
    learning_rate: Callable[[], float] | None = None,
    allow_rollback: bool = False,
) -> Reducer:
    """Return the reducer that a compressor needs for one bucket."""
    own = Comm(comm.group)  # counts its own bytes
    reducer: Reducer = reducer_class(compressor)(
        compressor,
        layout,
        own,
        settings,
        device=device,
        learning_rate=learning_rate,
        allow_rollback=allow_rollback,
    )
    return reducer


def reducer_class(compressor: Compressor) -> Any:
    """Return the class of a compressor's reducer; all take the same arguments."""
    if isinstance(compressor, PowerSGD):
        return PowerSGDReducer
    return DenseReducer if isinstance(compressor, Dense) else Reducer


def _split_into_buckets(
    parameters: list[NamedParameter], bucket_cap_mb: float | None
) -> Iterator[list[NamedParameter]]:
    """Yield parameters from last to first, split where the device changes or a bucket would exceed its cap."""
    if not parameters:
        raise ConfigError("there is no gradient to compress; the model has no trainable parameter.")
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        raise ConfigError(f"bucket_cap_mb is {bucket_cap_mb:g}; it must be above 0, or None for a single bucket.")
    limit = torch.inf if bucket_cap_mb is None else bucket_cap_mb * 2**20 / 4  # elements of float32
    group: list[NamedParameter] = []
    numel = 0
    for name, parameter in reversed(parameters):
        full = group and (numel + parameter.numel() > limit or parameter.device != group[0][1].device)
        if full:
            yield group
            group, numel = [], 0
        group.append((name, parameter))
        numel += parameter.numel()
    yield group


def _learning_rate_getter(optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    def learning_rate() -> float:
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        if len(rates) > 1:
            raise ConfigError(
                "error_feedback='lr_scaled' needs one learning rate for all parameters; use 'gradient' with several."
            )
        return rates.pop()

    return learning_rate
