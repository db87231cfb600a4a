"""Compressed gradients between replicas of a sharded model (FSDP2): whole inside a node, few between nodes.

The model is sharded with `fully_shard` over the workers of one node. After backward a worker holds the gradients of its
shard, reduced over the node by FSDP; its peers in the other nodes hold the same shard. FSDP's all-reduce hook is called
there, and the compressor works between these peers. FSDP's own two-dimensional mesh must not be used: it would
all-reduce everything before the hook is called.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.auto import Auto, AutoCompression, resolve_compressor
from smelt.train.gradients.bucket import Vector
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compression import Compressed, reducer_of
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.layout import Layout, Piece
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import Settings

_Unit = tuple[str, FSDPModule, list[DTensor]]
_ONE_EACH = 1e-9  # megabytes: every unit is a vector of its own


class Replicas(Compressed):
    """What `compress_replicas` gives back."""

    def __init__(self, compressor: Compressor, settings: Settings, shards: int) -> None:
        self.compressor, self.settings, self.shards = compressor, settings, shards
        self.workers = Workers()  # each of all workers keeps a state
        self._reducers: list[Reducer] = []

    @property
    def reducers(self) -> list[Reducer]:
        return self._reducers


def compress_replicas(
    model: nn.Module,
    compressor: Compressor | str,
    group: distributed.ProcessGroup,
    settings: Settings | None = None,
) -> Replicas | AutoReplicas:
    """From the next backward on peers send each other only what the compressor chooses.

    `group`: the workers that hold the same shard, one of each replica. All take the parameters of the first. What one
    call of `fully_shard` has put together is one tensor to a compressor, with a memory of its own. The compressor
    "auto", or `Auto(...)`, finds out in the first steps which one pays, if any does.
    """
    if isinstance(compressor, str):
        compressor = resolve_compressor(compressor)
    if settings is not None and settings.node is not None:
        raise ConfigError("a model that is sharded inside its nodes has been reduced there; leave node at None.")
    units = _units(model)
    for _, _, parameters in units:
        for parameter in parameters:
            distributed.broadcast(parameter.to_local().detach(), group=group, group_src=0)
    peers, settings = Workers(group), settings or Settings()
    if isinstance(compressor, Auto):
        return AutoReplicas(units, compressor, peers, settings)
    found = Replicas(compressor, settings, distributed.get_world_size() // peers.size)
    for name, unit, parameters in units:
        layout = Layout((Piece(name, (1, _size(parameters)), 0),))
        reducer = reducer_of(compressor, layout, peers, found.settings, parameters[0].to_local().device)
        found.reducers.append(reducer)
        unit.set_all_reduce_hook(_Hook(reducer))
    return found


class AutoReplicas(AutoCompression):
    """The same with methods that are found in the first steps; the slowest of all peers decides for all shards."""

    def __init__(self, units: list[_Unit], compressor: Auto, peers: Workers, settings: Settings) -> None:
        self._peers = peers
        self._seen: set[str] = set()  # units whose gradients have come in this step
        vectors = [
            (name, torch.empty((1, _size(parameters)), device=parameters[0].to_local().device))
            for name, _, parameters in units
        ]
        super().__init__(vectors, compressor, Workers(), settings, vector_mb=_ONE_EACH)
        self.shards = self.workers.size // peers.size
        for name, unit, _ in units:
            unit.set_all_reduce_hook(partial(self._reduce, name))

    @property
    def between(self) -> Workers:
        return self._peers

    def is_last(self, vector: Vector) -> bool:
        return len(self._seen) == len(self.vectors)

    def _reduce(self, name: str, reduced: Tensor) -> None:
        """In place of FSDP's all-reduce; units come in the order of backward, whatever it is."""
        vector = self._home[name]
        with torch.no_grad():
            if self.decided:  # no copy is needed any more
                vector.reducer.mean(reduced.flatten()).into(0, reduced)
                return
            if not self._seen or name in self._seen:  # a step begins; the one before may have left units out
                self._seen.clear()
                self.begin_step()
            self._seen.add(name)
            vector.put(name, reduced.view(1, -1))
            self.reduce_vector(vector)
            vector.give(name, reduced)
            if self.is_last(vector):
                self._seen.clear()


class _Hook:
    """Replaces a shard's gradients by their mean over the replicas."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self, reduced: Tensor) -> None:
        with torch.no_grad():
            self._reducer.mean(reduced.flatten()).into(0, reduced)


def _units(model: nn.Module) -> list[_Unit]:
    """What `fully_shard` was called for, with the parameters that each gathers itself."""
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
    if not units:
        raise ConfigError("compress_replicas takes a model that fully_shard was applied to; use compress_gradients.")
    found = [(name or "root", unit, _own(model.get_submodule(name))) for name, unit in units.items()]
    return [each for each in found if each[2]]


def _own(unit: nn.Module) -> list[DTensor]:
    """Trained parameters that a unit itself gathers, not those of units inside it."""
    found: dict[DTensor, None] = {}
    waiting: list[nn.Module] = [unit]
    while waiting:
        module = waiting.pop()
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                found[_checked(parameter)] = None
        waiting += [child for child in module.children() if not isinstance(child, FSDPModule)]
    return list(found)


def _checked(parameter: nn.Parameter) -> DTensor:
    if not isinstance(parameter, DTensor) or len(parameter.placements) != 1:
        raise ConfigError(
            "shard the model over the workers of one node only: fully_shard with a mesh of one dimension."
        )
    if not isinstance(parameter.placements[0], Shard) or parameter.placements[0].dim != 0:
        raise ConfigError("compress_replicas takes parameters that are sharded along their first dimension only.")
    return parameter


def _size(parameters: list[DTensor]) -> int:
    return sum(map(_shard_size, parameters))


def _shard_size(parameter: DTensor) -> int:
    """Elements of a shard, as FSDP pads it."""
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())
    return rows * prod(parameter.shape[1:])
