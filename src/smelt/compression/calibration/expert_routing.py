"""Which tokens of a batch are routed to which expert."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compression.calibration.block_inputs import BlockInputs, StopForward
from smelt.models.anatomy import Block
from smelt.models.experts import SeparateExperts


class ExpertRouting:
    """The router's decisions for the batch that is running."""

    def __init__(self, mixtures: list[SeparateExperts]) -> None:
        self._choices: dict[nn.Module, Tensor] = {}
        self._tokens: dict[nn.Module, list[Tensor]] = {}
        self._experts = {
            layer: (mixture, position)
            for mixture in mixtures
            for position, expert in enumerate(mixture)
            for layer in expert.modules()
        }

    def record(self, mixture: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Pre-forward hook of a mixture, which receives the hidden states, the chosen experts and their weights."""
        self._choices[mixture] = args[1]
        self._tokens.pop(mixture, None)

    def unpadded_rows(self, module: nn.Module, states: Tensor, mask: Tensor | None) -> Tensor:
        """Return the unpadded rows of a module's input or output [..., columns]; in an expert, those of its tokens."""
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
def track_routing(block: nn.Module) -> Iterator[ExpertRouting]:
    """Track the routing of every batch that runs through the block inside the context."""
    mixtures = [module for module in block.modules() if isinstance(module, SeparateExperts)]
    routing = ExpertRouting(mixtures)
    hooks = [mixture.register_forward_pre_hook(routing.record) for mixture in mixtures]
    try:
        yield routing
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def count_expert_tokens(block_inputs: BlockInputs, block: Block) -> dict[str, int]:
    """Count the unpadded tokens routed to each expert of a block, by its path; the block runs only up to the router."""
    experts = [part for part in block.parts if part.mixture is not None]
    if not experts or experts[0].mixture is None:
        return {}
    counts = [0] * len(experts)
    mask: Tensor | None = None

    def count(_: nn.Module, args: tuple[Any, ...]) -> None:
        index = args[1] if mask is None else args[1][mask.flatten()]  # [tokens, chosen]
        for position, tokens in enumerate(torch.bincount(index.flatten(), minlength=len(experts)).tolist()):
            counts[position] += tokens
        raise StopForward

    hook = experts[0].mixture.module.register_forward_pre_hook(count)
    try:
        for batch in range(len(block_inputs)):
            mask = block_inputs.masks[batch]
            with suppress(StopForward):
                block_inputs.run(block.module, block.index, batch)
    finally:
        hook.remove()
    return {part.path: tokens for part, tokens in zip(experts, counts, strict=True)}
