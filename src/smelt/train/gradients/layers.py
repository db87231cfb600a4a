"""The layers of any model, in the order in which they stand: the blocks of its largest list, and what is beside it."""

from __future__ import annotations

from torch import nn


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """By name. Modules without parameters are none; parameters that the model holds itself are in none."""
    lists = {name: each for name, each in model.named_modules() if isinstance(each, _LISTS) and len(each) > 1}
    blocks = max(lists, key=lambda name: _size(lists[name]), default="")
    found: dict[str, nn.Module] = {}

    def look(module: nn.Module, before: str) -> None:
        for name, child in module.named_children():
            whole = before + name
            holds_blocks = blocks == whole or blocks.startswith(f"{whole}.")
            if holds_blocks or isinstance(child, _NEVER_CALLED):
                look(child, f"{whole}.")
            elif _size(child):
                found[whole] = child

    look(model, "")
    return found


_LISTS = (nn.ModuleList, nn.Sequential)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
