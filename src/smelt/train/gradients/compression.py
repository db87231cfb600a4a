"""The gradients of a model, compressed: flat vectors with a reducer each, filled tensor by tensor as backward goes on.

The vectors are made once from the list of parameters, last one first, since their gradients are ready first. They do
not follow the buckets of DDP, which change after the first iteration and start anew in every run: so no state is ever
moved, and a resumed run finds its own. A vector is reduced when all of its tensors have arrived and those before it are
done, which is the same order on every worker.
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
from smelt.train.gradients.bucket import Vector
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors.powersgd import PowerSGD
from smelt.train.gradients.dense import Dense, DenseReducer
from smelt.train.gradients.hierarchy import Nodes
from smelt.train.gradients.layout import Layout
from smelt.train.gradients.low_rank import LowRankReducer
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import Settings
from smelt.train.gradients.traffic import Traffic, total

Named = tuple[str, Tensor]


class Compressed(ABC):
    """Reducers that belong to one model: what a checkpoint holds, whatever hands the gradients in."""

    compressor: Compressor
    settings: Settings
    workers: Workers  # that keep a state each
    shards: int = 1  # workers that hold different parts of one model

    @property
    @abstractmethod
    def reducers(self) -> list[Reducer]:
        """In the same order on every worker."""

    @property
    def layouts(self) -> list[Layout]:
        """Of whole vectors, the same on every worker: a reducer may have a part of one."""
        return [reducer.layout for reducer in self.reducers]

    @property
    def steps(self) -> int:
        """That were applied."""
        return self.reducers[0].number

    @property
    def traffic(self) -> Traffic:
        """Of the last step, on this worker."""
        return total(reducer.traffic for reducer in self.reducers)

    @property
    def total(self) -> Traffic:
        """Of all steps, on this worker."""
        return total(reducer.total for reducer in self.reducers)

    def settle(self) -> None:
        """Put everything back if the last step was not finite somewhere, as the gradient scaler skipped it too."""
        finite = [reducer.settle() for reducer in self.reducers]
        if not all(finite):
            for reducer in self.reducers:
                reducer.undo()


class Compression(Compressed):
    """What `compress_gradients` gives back: the state of compression on this worker, and what it sends."""

    def __init__(
        self,
        parameters: Iterable[Named],
        compressor: Compressor,
        workers: Workers,
        settings: Settings | None = None,
        *,
        vector_mb: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        watch_unused: bool = False,
    ) -> None:
        self.compressor, self.workers, self.settings = compressor, workers, settings or Settings()
        self._scaler, self._watch_unused = scaler, watch_unused
        self.nodes = None if self.settings.node is None else Nodes.of(workers, self.settings.node)
        self.shards = 1 if self.nodes is None else self.nodes.inside.size
        rate = None if optimizer is None else _rate_of(optimizer)
        self.vectors = []
        for group in _groups(list(parameters), vector_mb):
            layout, device = Layout.of(group), group[0][1].device
            if self.nodes is not None:
                workers.require_equal(str(layout), "model")
            own = layout if self.nodes is None else self.nodes.share(layout)
            reducer = self.make_reducer(own, device, rate, scaler is not None)
            self.vectors.append(Vector(device, layout, reducer, self.nodes))
        self._home = {name: vector for vector in self.vectors for name in vector.names}
        self._next = 0  # vector to be reduced
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext  # each reduction: such as a clock

    @property
    def reducers(self) -> list[Reducer]:
        return [vector.reducer for vector in self.vectors]

    @property
    def layouts(self) -> list[Layout]:
        return [vector.layout for vector in self.vectors]

    @property
    def between(self) -> Workers:
        """Those that compressed gradients travel between: all workers, or one of each node."""
        return self.workers if self.nodes is None else self.nodes.peers

    @property
    def traffic(self) -> Traffic:
        return super().traffic + Traffic(inside=sum(vector.inside for vector in self.vectors))

    @property
    def total(self) -> Traffic:
        return super().total + Traffic(inside=sum(vector.total_inside for vector in self.vectors))

    @property
    def plain(self) -> bool:
        """Whether DDP should send its buckets by itself, as if there were no compression."""
        return False

    def make_reducer(
        self, layout: Layout, device: torch.device, rate: Callable[[], float] | None, rollback: bool
    ) -> Reducer:
        """Of one vector."""
        settings = replace(self.settings, node=None)
        return reducer_of(self.compressor, layout, self.between, settings, device, rate, rollback)

    def put(self, name: str, gradient: Tensor) -> bool:
        """Take one gradient in, which nobody changes until `give` does; whether vectors were reduced because of it."""
        if not self._next and not any(vector.arrived for vector in self.vectors):
            self.settle()
        self._home[name].put(name, gradient, stays=True)
        before = self._next
        while self._next < len(self.vectors) and self.vectors[self._next].complete:
            with self.around():
                self.reduce_vector(self.vectors[self._next])
            self._next += 1
        return self._next > before

    def reduce_vector(self, vector: Vector) -> None:
        """All gradients of a vector have arrived."""
        vector.reduce(self._scale(), self._watch_unused)

    def done(self, name: str) -> bool:
        """Whether the mean of this gradient is known."""
        return self._home[name].done

    def give(self, name: str, gradient: Tensor) -> None:
        """A gradient becomes its mean over all workers."""
        self._home[name].give(name, gradient)
        if self._next == len(self.vectors) and not any(other.done for other in self.vectors):
            self._next = 0

    def abandon(self) -> None:
        """Forget gradients that have arrived in a step that ended in an error."""
        self._next = 0
        for vector in self.vectors:
            vector.clear()

    def _scale(self) -> Tensor | None:
        """Of the loss, without asking the device."""
        return None if self._scaler is None else self._scaler.scale(torch.ones(1, device=self.vectors[0].device))


def _groups(parameters: list[Named], vector_mb: float | None) -> Iterator[list[Named]]:
    """The parameters from the last to the first, cut where the device changes or a vector would grow too long."""
    if not parameters:
        raise ConfigError("there is no gradient to compress; the model has no parameter that is trained.")
    if vector_mb is not None and not vector_mb > 0:
        raise ConfigError(f"vector_mb is {vector_mb:g}; it must be above 0, or None for the whole model in one vector.")
    limit = torch.inf if vector_mb is None else vector_mb * 2**20 / 4  # elements of float32
    group: list[Named] = []
    size = 0
    for name, parameter in reversed(parameters):
        full = group and (size + parameter.numel() > limit or parameter.device != group[0][1].device)
        if full:
            yield group
            group, size = [], 0
        group.append((name, parameter))
        size += parameter.numel()
    yield group


def reducer_of(
    compressor: Compressor,
    layout: Layout,
    workers: Workers,
    settings: Settings,
    device: torch.device,
    rate: Callable[[], float] | None = None,
    rollback: bool = False,
) -> Reducer:
    """The reducer that a compressor needs for one vector."""
    own = Workers(workers.group)  # counts its own bytes
    kind = reducer_kind(compressor)
    return kind(compressor, layout, own, settings, device=device, learning_rate=rate, rollback=rollback)


def reducer_kind(compressor: Compressor) -> Any:
    """The class of it; all are made from the same arguments."""
    if isinstance(compressor, PowerSGD):
        return LowRankReducer
    return DenseReducer if isinstance(compressor, Dense) else Reducer


def _rate_of(optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    def rate() -> float:
        rates = {float(group["lr"]) for group in optimizer.param_groups}
        if len(rates) > 1:
            raise ConfigError("form='paper' needs one learning rate for all parameters; use form='code' with several.")
        return rates.pop()

    return rate
