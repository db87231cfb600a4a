"""Apply a sharding plan to a network: `fully_shard` each unit, and set what FSDP2 prefetches."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from smelt.errors import ConfigError
from smelt.train.fsdp.plan import ModelProfile, ShardingPlan


def apply_plan(plan: ShardingPlan, model: ModelProfile, network: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a network over the ranks of a mesh, in place."""
    if any(isinstance(module, FSDPModule) for module in network.modules()):
        raise ConfigError("fully_shard was applied to this network before; pass a network that is not sharded.")
    unit_modules = find_unit_modules(plan, model, network)
    for unit, modules in zip(plan.units, unit_modules, strict=True):
        target = modules if len(modules) > 1 else modules[0]
        fully_shard(target, mesh=mesh, reshard_after_forward=unit.reshard_after_forward)
    fully_shard(network, mesh=mesh, reshard_after_forward=False)
    roots = [network] if model.root.bytes else []
    _set_prefetch(
        [cast(FSDPModule, module) for module in (*roots, *(modules[0] for modules in unit_modules))],
        plan,
        len(roots),
    )


def find_unit_modules(plan: ShardingPlan, model: ModelProfile, network: nn.Module) -> list[list[nn.Module]]:
    """Return the modules of each unit of a plan."""
    modules = dict(network.named_modules())
    for layer in model.layers:
        if layer.name not in modules:
            raise ConfigError(f"the network has no layer {layer.name!r}; make a plan for this network.")
    return [[modules[name] for name in unit.names(model)] for unit in plan.units]


def _set_prefetch(modules: list[FSDPModule], plan: ShardingPlan, num_roots: int) -> None:
    """`modules`: in the order of forward; in backward the root comes first too."""
    backward_order = [*modules[:num_roots], *reversed(modules[num_roots:])]
    for index, (forward, backward) in enumerate(zip(modules, backward_order, strict=True)):
        forward.set_modules_to_forward_prefetch(modules[index + 1 : index + 1 + plan.forward_prefetch])
        backward.set_modules_to_backward_prefetch(backward_order[index + 1 : index + 1 + plan.backward_prefetch])
