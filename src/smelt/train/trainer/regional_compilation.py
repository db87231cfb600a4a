"""Compile a network for training: of repeated blocks one, which all of them share, or the network as a whole."""

from __future__ import annotations

from torch import nn

_MIN_SHARE = 0.5  # of the parameters outside of embeddings; with less in repeated blocks, the rest is worth compiling


def compile_network(network: nn.Module) -> list[nn.Module]:
    """Let torch.compile run a network; return the modules that it compiles.

    The blocks of a transformer are the same code, so that compiling one of them takes a fraction of the time that the
    network would; what surrounds them runs eagerly.
    """
    compiled = repeated_blocks(network) or [network]
    for module in compiled:
        module.compile()
    return compiled


def restore_eager(modules: list[nn.Module]) -> None:
    """Let compiled modules run eagerly again; their layers may be replaced then without compiling anew."""
    for module in modules:
        module._compiled_call_impl = None


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """Return the largest list of modules of one class and shape that hold most of the parameters; empty: none does.

    Modules with hooks are left out: a hook that knows its block would be compiled with each block.
    """
    lists = [list(module) for module in network.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    same = [blocks for blocks in lists if len({_structure(block) for block in blocks}) == 1]
    same = [blocks for blocks in same if not any(map(_has_hooks, blocks))]
    blocks = max(same, key=lambda blocks: sum(map(_size, blocks)), default=[])
    embeddings = sum(_size(module) for module in network.modules() if isinstance(module, nn.Embedding))
    return blocks if sum(map(_size, blocks)) > _MIN_SHARE * (_size(network) - embeddings) else []


def _structure(module: nn.Module) -> tuple[object, ...]:
    return (type(module), *((name, parameter.shape) for name, parameter in module.named_parameters()))


def _has_hooks(block: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in block.modules())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
