"""A plan made real: `fully_shard` for each unit, what is gathered ahead, and what stays whole after forward."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from smelt.errors import ConfigError
from smelt.train.fsdp.facts import ModelProfile
from smelt.train.fsdp.plan import ShardingPlan


def apply_plan(plan: ShardingPlan, model: ModelProfile, network: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a network over the workers of a mesh, in place."""
    if any(isinstance(module, FSDPModule) for module in network.modules()):
        raise ConfigError("fully_shard was applied to this network before; plan for one that is whole.")
    units = modules_of_units(plan, model, network)
    for unit, members in zip(plan.units, units, strict=True):
        fully_shard(
            members if len(members) > 1 else members[0], mesh=mesh, reshard_after_forward=unit.reshard_after_forward
        )
    fully_shard(network, mesh=mesh, reshard_after_forward=False)
    root = [network] if model.rest.bytes else []
    _look_ahead([cast(FSDPModule, each) for each in (*root, *(members[0] for members in units))], plan, len(root))


def modules_of_units(plan: ShardingPlan, model: ModelProfile, network: nn.Module) -> list[list[nn.Module]]:
    """The modules of each unit."""
    modules = dict(network.named_modules())
    for layer in model.layers:
        if layer.name not in modules:
            raise ConfigError(f"the network has no layer {layer.name!r}; make a plan for this network.")
    return [[modules[name] for name in unit.names(model)] for unit in plan.units]


def _look_ahead(chain: list[FSDPModule], plan: ShardingPlan, roots: int) -> None:
    """`chain`: in the order of forward; in backward the root comes first too."""
    back = [*chain[:roots], *reversed(chain[roots:])]
    for place, (forward, backward) in enumerate(zip(chain, back, strict=True)):
        forward.set_modules_to_forward_prefetch(chain[place + 1 : place + 1 + plan.forward_prefetch])
        backward.set_modules_to_backward_prefetch(back[place + 1 : place + 1 + plan.backward_prefetch])
