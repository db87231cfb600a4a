"""The layers of any model in order: the blocks of its largest list, and the modules beside it."""

from __future__ import annotations

from torch import nn

_BLOCK_LISTS = (nn.ModuleList, nn.Sequential)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return layers by name, without modules that have no parameters; the model's own parameters are in none."""
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, _BLOCK_LISTS) and len(module) > 1
    }
    blocks = max(lists, key=lambda name: _num_parameters(lists[name]), default="")
    layers: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = prefix + name
            holds_blocks = blocks == path or blocks.startswith(f"{path}.")
            if holds_blocks or isinstance(child, _NEVER_CALLED):
                visit(child, f"{path}.")
            elif _num_parameters(child):
                layers[path] = child

    visit(model, "")
    return layers


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
