"""Other weights on trial: what the module around a group of layers gives with them, on a few batches.

The module is what AWQ's search looks at: the attention for q, k and v, the feed-forward for up and gate, and the layer
itself for what reads their units. Attention and feed-forward end in the part's output projection, so that its output
is the module's; the experts of a mixture are on trial together. While the feed-forward is on trial the attention before
it is not run again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.compression.calibration.block_inputs import BlockInputs
from smelt.compression.calibration.expert_routing import track_routing
from smelt.compression.quantization.layers import LayerGroup
from smelt.models.anatomy import Block

Change = Callable[[Tensor], Tensor]  # of a group's inputs


def first_batches(block_inputs: BlockInputs, tokens: int) -> list[int]:
    """The first batches, as many as together have at most so many positions; at least one."""
    chosen, total = [0], _positions(block_inputs.hidden[0])
    for batch in range(1, len(block_inputs)):
        total += _positions(block_inputs.hidden[batch])
        if total > tokens:
            break
        chosen.append(batch)
    return chosen


def _positions(hidden: Tensor) -> int:
    return hidden.shape[:-1].numel()


@contextmanager
def trial_weights(group: LayerGroup, weights: Sequence[Tensor], change: Change | None = None) -> Iterator[None]:
    """Inside, the group has these weights and its inputs are changed; afterwards it is as it was, to the bit."""
    kept = [layer.weight.detach().clone() for layer in group.layers]
    hooks = []
    if change is not None:
        changed = _remembering(change)
        hooks = [layer.module.register_forward_pre_hook(lambda _, args: (changed(args[0]),)) for layer in group.layers]
    try:
        _write(group, weights)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _write(group, kept)


def _remembering(change: Change) -> Change:
    """Layers that are handed the same tensor one after the other get the same result, computed once."""
    last: list[Tensor] = []

    def changed(x: Tensor) -> Tensor:
        if not last or last[0] is not x:
            last[:] = [x, change(x)]
        return last[1]

    return changed


@torch.no_grad()
def _write(group: LayerGroup, weights: Sequence[Tensor]) -> None:
    for layer, weight in zip(group.layers, weights, strict=True):
        layer.weight.copy_(weight)


class OutputError(ABC):
    """What is around a group of layers, and what it gave with the weights that the group has at the start."""

    truth: list[Tensor]  # [real tokens, outputs] a batch

    @abstractmethod
    def outputs(self, weights: Sequence[Tensor], change: Change | None = None) -> Iterator[Tensor]:
        """What it gives with these weights, batch by batch."""

    @torch.no_grad()
    def error(self, weights: Sequence[Tensor], change: Change | None = None) -> float:
        """Mean squared difference from the truth."""
        pairs = zip(self.outputs(weights, change), self.truth, strict=True)
        total = sum(float((output.float() - true.float()).square().sum(dtype=torch.float64)) for output, true in pairs)
        return total / max(1, sum(true.numel() for true in self.truth))


class LayerOutputError(OutputError):
    """Of a single layer: its inputs are kept, and multiplied."""

    def __init__(self, block_inputs: BlockInputs, block: Block, group: LayerGroup, tokens: int) -> None:
        (layer,) = group.layers
        batches = first_batches(block_inputs, tokens)
        self.inputs = [rows for rows, _ in _runs(block_inputs, block, layer.module, batches)]
        self.truth = list(self.outputs([layer.weight]))

    @torch.no_grad()
    def outputs(self, weights: Sequence[Tensor], change: Change | None = None) -> Iterator[Tensor]:
        for x in self.inputs:
            yield F.linear(x if change is None else change(x), weights[0].to(x.dtype))


class ModuleOutputError(OutputError):
    """Of layers that write a part's units: the part's output projection. The block runs no further."""

    def __init__(self, block_inputs: BlockInputs, block: Block, group: LayerGroup, tokens: int) -> None:
        self.block_inputs, self.block, self.group = block_inputs, block, group
        self.batches = first_batches(block_inputs, tokens)
        before = [part.owner for part in block.parts if part.kind == "heads" and part is not group.part]
        self.holder: nn.Module | None = before[0] if before else None
        self.held: list[Any] = []
        with _recording(self.holder, self.held):
            self.truth = list(self._outputs())

    def outputs(self, weights: Sequence[Tensor], change: Change | None = None) -> Iterator[Tensor]:
        with trial_weights(self.group, weights, change), _repeating(self.holder, self.held):
            yield from self._outputs()

    def _outputs(self) -> Iterator[Tensor]:
        for _, output in _runs(self.block_inputs, self.block, self.group.exit, self.batches):
            yield output


class BlockOutputError(ModuleOutputError):
    """Of any layers: the hidden states that leave the block."""

    @torch.no_grad()
    def _outputs(self) -> Iterator[Tensor]:
        for batch in self.batches:
            rows = self.block_inputs.run(self.block.module, self.block.index, batch).flatten(0, -2)
            mask = self.block_inputs.masks[batch]
            yield rows if mask is None else rows[mask.flatten()]

    @property
    def size(self) -> float:
        """Mean square of the true output."""
        total = sum(float(true.float().square().sum(dtype=torch.float64)) for true in self.truth)
        return total / sum(true.numel() for true in self.truth)


class _Ended(Exception):
    """The forward has passed the module that was asked for."""


@torch.no_grad()
def _runs(
    block_inputs: BlockInputs, block: Block, module: nn.Module, batches: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """What enters and leaves a module of the block, batch by batch, real tokens only. The block runs no further. Where
    nothing of a batch comes to the module, as may be with an expert, the batch is left out."""
    seen: list[tuple[Tensor, Tensor]] = []

    def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append((args[0], output))
        raise _Ended

    for batch in batches:
        with track_routing(block.module) as routing:
            handle = module.register_forward_hook(after)
            try:
                with suppress(_Ended):
                    block_inputs.run(block.module, block.index, batch)
            finally:
                handle.remove()
        for states in (seen.pop() for _ in range(len(seen))):
            entered, left = (routing.unpadded_rows(module, one, block_inputs.masks[batch]) for one in states)
            yield entered, left


@contextmanager
def _recording(holder: nn.Module | None, held: list[Any]) -> Iterator[None]:
    """Keep what a module gives."""
    if holder is None:
        yield
        return
    handle = holder.register_forward_hook(lambda _, args, output: held.append(output))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _repeating(holder: Any, held: list[Any]) -> Iterator[None]:
    """A module gives again, call by call, what was kept."""
    if holder is None:
        yield
        return
    again = iter(held)
    holder.forward = lambda *args, **kwargs: next(again)
    try:
        yield
    finally:
        del holder.forward
