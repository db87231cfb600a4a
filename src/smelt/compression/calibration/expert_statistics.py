"""What calibration data shows of the experts of a mixture: how many tokens each gets, and how large its outputs are.

Padding is left out. Every weight is the one with which the network adds up the outputs, normalized or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compression.calibration.block_inputs import BlockInputs
from smelt.models.anatomy import Block, Mixture


@dataclass
class ExpertStatistics:
    """Sums over the calibration tokens of one mixture, one entry per expert, in float64 on CPU."""

    tokens: Tensor  # routed to each expert
    weighted_norms: Tensor  # sum over those of router weight times L2 norm of the expert's output
    logit_products: Tensor  # [experts, experts]: products of router logits, summed over all tokens

    @classmethod
    def zeros(cls, num_experts: int) -> ExpertStatistics:
        return cls(*(torch.zeros(*size, dtype=torch.float64) for size in ((num_experts,),) * 2 + ((num_experts,) * 2,)))

    @property
    def mean_weighted_norms(self) -> Tensor:
        """The mean per routed token; 0 for an expert that no token was routed to."""
        return self.weighted_norms / self.tokens.clamp_min(1)

    @property
    def similarity(self) -> Tensor:
        """The cosine between the router logits of two experts: [experts, experts]."""
        norms = self.logit_products.diagonal().sqrt().clamp_min(1e-12)
        return self.logit_products / (norms[:, None] * norms[None, :])


class _Observer:
    """Adds up the statistics of one mixture in hooks: the router's, the mixture's and each expert's."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.sums = ExpertStatistics.zeros(mixture.num_experts)
        self.mask: Tensor | None = None  # of unpadded tokens in the batch that runs: [tokens]
        self._indices: list[Tensor] = []  # of each expert, into the flattened router weights
        self._weights = torch.empty(0)

    def after_router(self, _: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        logits = self._unpadded(output[0].reshape(-1, self.mixture.num_experts).detach().double())
        self.sums.logit_products += (logits.T @ logits).cpu()

    def before_experts(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        index, self._weights = args[1], args[2]
        self._indices = list(self.mixture.module.routed_indices(index))
        counted = self._unpadded(index).flatten()
        self.sums.tokens += torch.bincount(counted, minlength=self.mixture.num_experts).cpu()

    def after_expert(self, position: int, output: Tensor) -> None:
        indices = self._indices[position]
        products = self._weights.flatten()[indices].double() * output.detach().double().norm(dim=-1)
        if self.mask is not None:
            products = products[self.mask[indices // self._weights.shape[-1]]]
        self.sums.weighted_norms[position] += products.sum().cpu()

    def _unpadded(self, rows: Tensor) -> Tensor:
        return rows if self.mask is None else rows[self.mask]


@contextmanager
def _observed(observer: _Observer) -> Iterator[None]:
    mixture = observer.mixture
    hooks = [
        mixture.router.register_forward_hook(observer.after_router),
        mixture.module.register_forward_pre_hook(observer.before_experts),
    ]
    for position, expert in enumerate(mixture.module):

        def after(_: nn.Module, args: Any, output: Tensor, position: int = position) -> None:
            observer.after_expert(position, output)

        hooks.append(expert.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def observe_experts(block_inputs: BlockInputs, block: Block) -> ExpertStatistics | None:
    """Run a block on all batches and advance to the next one; return the statistics of its mixture, if it has one."""
    mixture = next((part.mixture for part in block.parts if part.mixture is not None), None)
    if mixture is None:
        for batch in range(len(block_inputs)):
            block_inputs.advance(batch, block_inputs.run(block.module, block.index, batch))
        return None
    observer = _Observer(mixture)
    with _observed(observer):
        for batch in range(len(block_inputs)):
            mask = block_inputs.masks[batch]
            observer.mask = None if mask is None else mask.flatten()
            block_inputs.advance(batch, block_inputs.run(block.module, block.index, batch))
    return observer.sums
