"""Which tokens reach which expert of a mixture: their rows among what an expert is given, and their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compression.calibration.stream import Stream
from smelt.models.anatomy import Block
from smelt.models.experts import SeparateExperts


class Routes:
    """The router's choices of the batch that is running."""

    def __init__(self, mixtures: list[SeparateExperts]) -> None:
        self._choices: dict[nn.Module, Tensor] = {}
        self._tokens: dict[nn.Module, list[Tensor]] = {}
        self._experts = {
            layer: (mixture, position)
            for mixture in mixtures
            for position, expert in enumerate(mixture)
            for layer in expert.modules()
        }

    def note(self, mixture: nn.Module, args: tuple[Tensor, ...]) -> None:
        """A hook before a mixture: it is handed the hidden states, the chosen experts and their weights."""
        self._choices[mixture] = args[1]
        self._tokens.pop(mixture, None)

    def real(self, module: nn.Module, states: Tensor, mask: Tensor | None) -> Tensor:
        """The rows of real tokens of what enters or leaves a module, which inside an expert are not all tokens."""
        rows = states.flatten(0, -2)  # [..., columns] -> [rows, columns]
        if mask is None:
            return rows
        kept = mask.flatten()
        if module in self._experts:
            mixture, position = self._experts[module]
            if mixture not in self._tokens:
                self._tokens[mixture] = mixture.tokens(self._choices[mixture])
            kept = kept[self._tokens[mixture][position]]
        return rows[kept]


@contextmanager
def routed(block: nn.Module) -> Iterator[Routes]:
    """Inside, the routes of whatever runs through the block are known."""
    mixtures = [module for module in block.modules() if isinstance(module, SeparateExperts)]
    routes = Routes(mixtures)
    hooks = [mixture.register_forward_pre_hook(routes.note) for mixture in mixtures]
    try:
        yield routes
    finally:
        for hook in hooks:
            hook.remove()


class _Chosen(Exception):
    """The experts were chosen; what follows is not needed."""


@torch.no_grad()
def expert_tokens(stream: Stream, block: Block) -> dict[str, int]:
    """How many real tokens reach each expert of a block, by its path. The block runs no further than the router."""
    experts = [part for part in block.parts if part.mixture is not None]
    if not experts or experts[0].mixture is None:
        return {}
    counts = [0] * len(experts)
    mask: Tensor | None = None

    def count(_: nn.Module, args: tuple[Any, ...]) -> None:
        index = args[1] if mask is None else args[1][mask.flatten()]  # [tokens, chosen]
        for position, found in enumerate(torch.bincount(index.flatten(), minlength=len(experts)).tolist()):
            counts[position] += found
        raise _Chosen

    hook = experts[0].mixture.module.register_forward_pre_hook(count)
    try:
        for batch in range(len(stream)):
            mask = stream.masks[batch]
            with suppress(_Chosen):
                stream.run(block.module, block.index, batch)
    finally:
        hook.remove()
    return {part.path: found for part, found in zip(experts, counts, strict=True)}
