"""Compressed gradients for hybrid sharding (FSDP2): sharded inside a node, compressed between replicas.

The model is sharded with `fully_shard` over the ranks of one node. After backward a rank holds the gradients of its
shard, reduced over the node by FSDP; its peers in the other nodes hold the same shard. FSDP calls the all-reduce hook
there, and the compressor works between these peers. Do not use FSDP's own two-dimensional mesh: it would all-reduce
everything before the hook is called.
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
from smelt.train.gradients.bucket import GradientBucket
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compression import GradientCompression, build_reducer
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.layout import BucketLayout, ParamSlice
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import CompressionSettings

_FSDPUnit = tuple[str, FSDPModule, list[DTensor]]
_ONE_UNIT_PER_BUCKET = 1e-9  # megabytes


class HSDPCompression(GradientCompression):
    """What `compress_hsdp` returns."""

    def __init__(self, compressor: Compressor, settings: CompressionSettings, shards: int) -> None:
        self.compressor, self.settings, self.shards = compressor, settings, shards
        self.comm = Comm()  # every rank keeps a state
        self._reducers: list[Reducer] = []

    @property
    def reducers(self) -> list[Reducer]:
        return self._reducers


def compress_hsdp(
    model: nn.Module,
    compressor: Compressor | str,
    group: distributed.ProcessGroup,
    settings: CompressionSettings | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> HSDPCompression | AutoHSDPCompression:
    """Compress the gradients that the replicas of a sharded model exchange, from the next backward on.

    `group`: the ranks that hold the same shard, one per replica; all take the parameters of the first. The parameters
    of one call of `fully_shard` are one tensor to a compressor, with a residual of its own. `optimizer`: checked
    against the compressor's own momentum. The compressor "auto", or `Auto(...)`, measures in the first steps which
    one pays off, if any.
    """
    if isinstance(compressor, str):
        compressor = resolve_compressor(compressor)
    if settings is not None and settings.ranks_per_node is not None:
        raise ConfigError("a sharded model is reduced inside its nodes already; leave ranks_per_node at None.")
    units = _fsdp_units(model)
    for _, _, parameters in units:
        for parameter in parameters:
            distributed.broadcast(parameter.to_local().detach(), group=group, group_src=0)
    peers, settings = Comm(group), settings or CompressionSettings()
    if isinstance(compressor, Auto):
        return AutoHSDPCompression(units, compressor, peers, settings, optimizer)
    compressor.check_optimizer(optimizer)
    compression = HSDPCompression(compressor, settings, distributed.get_world_size() // peers.world_size)
    for name, unit, parameters in units:
        layout = BucketLayout((ParamSlice(name, (1, _shard_numel(parameters)), 0),))
        reducer = build_reducer(compressor, layout, peers, settings, parameters[0].to_local().device)
        compression.reducers.append(reducer)
        unit.set_all_reduce_hook(_AllReduceHook(reducer))
    return compression


class AutoHSDPCompression(AutoCompression):
    """The same with methods chosen in the first steps; the slowest of all peers decides for all shards."""

    def __init__(
        self,
        units: list[_FSDPUnit],
        compressor: Auto,
        peers: Comm,
        settings: CompressionSettings,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._peers = peers
        self._reduced_units: set[str] = set()  # names of units, in this step
        shards = [
            (name, torch.empty((1, _shard_numel(parameters)), device=parameters[0].to_local().device))
            for name, _, parameters in units
        ]
        super().__init__(shards, compressor, Comm(), settings, bucket_cap_mb=_ONE_UNIT_PER_BUCKET, optimizer=optimizer)
        self.shards = self.comm.world_size // peers.world_size
        for name, unit, _ in units:
            unit.set_all_reduce_hook(partial(self._reduce, name))

    @property
    def reduction_comm(self) -> Comm:
        return self._peers

    def is_last(self, bucket: GradientBucket) -> bool:
        return len(self._reduced_units) == len(self.buckets)

    def _reduce(self, name: str, gradient: Tensor) -> None:
        """Replace FSDP's all-reduce; units come in the order of backward, whatever it is."""
        bucket = self._bucket_of[name]
        with torch.no_grad():
            if self.decided:  # no copy is needed any more
                bucket.reducer.mean(gradient.flatten()).copy_into(0, gradient)
                return
            if not self._reduced_units or name in self._reduced_units:  # a new step; the last may have left units out
                self._reduced_units.clear()
                self.begin_step()
            self._reduced_units.add(name)
            bucket.add(name, gradient.view(1, -1))
            self.reduce_bucket(bucket)
            bucket.write_back(name, gradient)
            if self.is_last(bucket):
                self._reduced_units.clear()


class _AllReduceHook:
    """Replaces a shard's gradients by their mean over the replicas."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self, gradient: Tensor) -> None:
        with torch.no_grad():
            self._reducer.mean(gradient.flatten()).copy_into(0, gradient)


def _fsdp_units(model: nn.Module) -> list[_FSDPUnit]:
    """Return the modules that `fully_shard` was called for, with the parameters that each gathers itself."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not modules:
        raise ConfigError("compress_hsdp takes a model that fully_shard was applied to; use compress_gradients.")
    units = [(name or "root", unit, _own_parameters(model.get_submodule(name))) for name, unit in modules.items()]
    return [unit for unit in units if unit[2]]


def _own_parameters(unit: nn.Module) -> list[DTensor]:
    """Return the trainable parameters that a unit itself gathers, without those of nested units."""
    parameters: dict[DTensor, None] = {}
    pending: list[nn.Module] = [unit]
    while pending:
        module = pending.pop()
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameters[_require_sharded(parameter)] = None
        pending += [child for child in module.children() if not isinstance(child, FSDPModule)]
    return list(parameters)


def _require_sharded(parameter: nn.Parameter) -> DTensor:
    if not isinstance(parameter, DTensor) or len(parameter.placements) != 1:
        raise ConfigError("shard the model over the ranks of one node only: fully_shard with a mesh of one dimension.")
    if not isinstance(parameter.placements[0], Shard) or parameter.placements[0].dim != 0:
        raise ConfigError("compress_hsdp takes parameters that are sharded along their first dimension only.")
    return parameter


def _shard_numel(parameters: list[DTensor]) -> int:
    return sum(map(_padded_numel, parameters))


def _padded_numel(parameter: DTensor) -> int:
    """Elements of a shard, as FSDP pads it."""
    rows = -(-parameter.shape[0] // parameter.device_mesh.size())
    return rows * prod(parameter.shape[1:])
