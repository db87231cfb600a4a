"""Compressed gradients between replicas of a sharded model (FSDP2): whole inside a node, few between nodes.

The model is sharded with `fully_shard` over the workers of one node. After backward a worker holds the gradients of its
shard, reduced over the node by FSDP; its peers in the other nodes hold the same shard. FSDP's all-reduce hook is called
there, and the compressor works between these peers. FSDP's own two-dimensional mesh must not be used: it would
all-reduce everything before the hook is called.
"""

from __future__ import annotations

from math import prod

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from smelt.errors import RecipeError
from smelt.train.compression import Compressed, reducer_of
from smelt.train.compressor import Compressor
from smelt.train.compressors import compressor_named
from smelt.train.layout import Layout, Piece
from smelt.train.reducer import Reducer
from smelt.train.settings import Settings
from smelt.train.workers import Workers


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
) -> Replicas:
    """From the next backward on peers send each other only what the compressor chooses.

    `group`: the workers that hold the same shard, one of each replica. All take the parameters of the first. What one
    call of `fully_shard` has put together is one tensor to a compressor, with a memory of its own.
    """
    if isinstance(compressor, str):
        compressor = compressor_named(compressor)
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FSDPModule)}
    if not units:
        raise RecipeError("compress_replicas takes a model that fully_shard was applied to; use compress_gradients.")
    if settings is not None and settings.node is not None:
        raise RecipeError("a model that is sharded inside its nodes has been reduced there; leave node at None.")
    peers = Workers(group)
    found = Replicas(compressor, settings or Settings(), distributed.get_world_size() // peers.size)
    for name, unit in units.items():
        parameters = _own(model.get_submodule(name))
        if not parameters:
            continue
        for parameter in parameters:
            distributed.broadcast(parameter.to_local().detach(), group=group, group_src=0)
        layout = Layout((Piece(name or "root", (1, sum(map(_shard_size, parameters))), 0),))
        device = parameters[0].to_local().device
        reducer = reducer_of(compressor, layout, peers, found.settings, device)
        found.reducers.append(reducer)
        unit.set_all_reduce_hook(_Hook(reducer))
    return found


class _Hook:
    """Replaces a shard's gradients by their mean over the replicas."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self, reduced: Tensor) -> None:
        with torch.no_grad():
            reduced.copy_(self._reducer.reduce(reduced.flatten()).view_as(reduced))


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
        raise RecipeError(
            "shard the model over the workers of one node only: fully_shard with a mesh of one dimension."
        )
    if not isinstance(parameter.placements[0], Shard) or parameter.placements[0].dim != 0:
        raise RecipeError("compress_replicas takes parameters that are sharded along their first dimension only.")
    return parameter


def _shard_size(parameter: DTensor) -> int:
    """Elements of a shard, as FSDP pads it."""
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())
    return rows * prod(parameter.shape[1:])
