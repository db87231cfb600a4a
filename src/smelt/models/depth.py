"""Remove whole blocks of a network: the list of blocks, their numbers and the configuration get shorter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from smelt.errors import ModelError
from smelt.models.anatomy import Anatomy


def check_removable_blocks(anatomy: Anatomy, what: str) -> None:
    """Raise if whole blocks of this network cannot be removed."""
    family, config = anatomy.family, anatomy.network.config
    simple = len(family.block_lists) == 1 and "*" not in family.block_lists[0] and bool(family.block_lists[0])
    if not simple or family.chain is not True or family.stateful or config.get_text_config() is not config:
        raise ModelError(
            f"{what} needs one list of blocks that follow one another, which {config.model_type} networks do not have; "
            "use a method that removes heads or channels, such as fisher."
        )
    if getattr(config, "num_hidden_layers", None) != len(anatomy.blocks):
        raise ModelError(f"the config of {config.model_type} networks does not number their blocks, so none can go.")


def keep_blocks(anatomy: Anatomy, keep: Sequence[int]) -> None:
    """Keep the blocks at these positions, in this order, and remove all others."""
    if not keep:
        raise ModelError("a network needs at least one block.")
    network, count = anatomy.network, len(anatomy.blocks)
    config: Any = network.config
    for position, index in enumerate(keep):
        for module in anatomy.blocks[index].module.modules():
            if isinstance(getattr(module, "layer_idx", None), int):  # the place of its KV cache
                module.layer_idx = position  # type: ignore[assignment]
    path = anatomy.blocks[0].path.rpartition(".")[0]
    parent, _, name = path.rpartition(".")
    modules = nn.ModuleList([anatomy.blocks[index].module for index in keep])
    setattr(network.get_submodule(parent), name, modules)
    for key, value in list(vars(config).items()):  # one entry per block, such as `layer_types`
        if isinstance(value, list) and len(value) == count and not key.startswith("_") and key != "architectures":
            setattr(config, key, [value[index] for index in keep])
    config.num_hidden_layers = len(keep)
