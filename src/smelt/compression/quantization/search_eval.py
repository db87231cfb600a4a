"""Evaluate candidate weights by the output error of the module around a layer group, on the first batches.

The module is that of AWQ's search: attention for q, k and v, the FFN for up and gate, and the layer itself for their
output projections. Attention and FFN end in the part's output projection, so its output is the module's; the experts of
a mixture are evaluated together. While the FFN is evaluated, recorded attention outputs are replayed.
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
    """Return the first batches with at most `tokens` positions in total, and at least one."""
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
    """Set the group's weights and transform its inputs inside the context; restore both bit for bit afterwards."""
    original = [layer.weight.detach().clone() for layer in group.layers]
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
        _write(group, original)


def _remembering(change: Change) -> Change:
    """Cache the last result, for layers that receive the same tensor one after the other."""
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
    """Output error of the module around a layer group, against its outputs with the initial weights."""

    truth: list[Tensor]  # [unmasked tokens, outputs] per batch

    @abstractmethod
    def outputs(self, weights: Sequence[Tensor], change: Change | None = None) -> Iterator[Tensor]:
        """Yield the outputs with these weights, batch by batch."""

    @torch.no_grad()
    def error(self, weights: Sequence[Tensor], change: Change | None = None) -> float:
        """Return the mean squared error against the initial outputs."""
        pairs = zip(self.outputs(weights, change), self.truth, strict=True)
        total = sum(float((output.float() - true.float()).square().sum(dtype=torch.float64)) for output, true in pairs)
        return total / max(1, sum(true.numel() for true in self.truth))


class LayerOutputError(OutputError):
    """Error at the output of a single layer, from its recorded inputs."""

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
    """Error of input projections at the part's output projection, where the forward pass stops."""

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
    """Error of any layers at the output of the block."""

    @torch.no_grad()
    def _outputs(self) -> Iterator[Tensor]:
        for batch in self.batches:
            rows = self.block_inputs.run(self.block.module, self.block.index, batch).flatten(0, -2)
            mask = self.block_inputs.masks[batch]
            yield rows if mask is None else rows[mask.flatten()]

    @property
    def size(self) -> float:
        """Return the mean square of the initial outputs."""
        total = sum(float(true.float().square().sum(dtype=torch.float64)) for true in self.truth)
        return total / sum(true.numel() for true in self.truth)


class _Ended(Exception):
    """Raised to stop the forward pass after the requested module."""


@torch.no_grad()
def _runs(
    block_inputs: BlockInputs, block: Block, module: nn.Module, batches: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the input and output of a module of the block, batch by batch, unmasked tokens only.

    The forward pass stops there. Batches that do not reach the module (an expert) are skipped.
    """
    recorded: list[tuple[Tensor, Tensor]] = []

    def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        recorded.append((args[0], output))
        raise _Ended

    for batch in batches:
        with track_routing(block.module) as routing:
            handle = module.register_forward_hook(after)
            try:
                with suppress(_Ended):
                    block_inputs.run(block.module, block.index, batch)
            finally:
                handle.remove()
        for states in (recorded.pop() for _ in range(len(recorded))):
            inputs, outputs = (routing.unpadded_rows(module, state, block_inputs.masks[batch]) for state in states)
            yield inputs, outputs


@contextmanager
def _recording(holder: nn.Module | None, held: list[Any]) -> Iterator[None]:
    """Record the outputs of a module."""
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
    """Replay recorded outputs of a module, call by call."""
    if holder is None:
        yield
        return
    replay = iter(held)
    holder.forward = lambda *args, **kwargs: next(replay)
    try:
        yield
    finally:
        del holder.forward
