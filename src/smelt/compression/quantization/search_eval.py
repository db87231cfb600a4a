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

from smelt.compression.calibration.block_inputs import BlockInputs, StopForward
from smelt.compression.calibration.expert_routing import track_routing
from smelt.compression.quantization.layers import LayerGroup
from smelt.models.anatomy import Block

InputTransform = Callable[[Tensor], Tensor]  # of a group's inputs


def first_batches(block_inputs: BlockInputs, tokens: int) -> list[int]:
    """Return the first batches with at most `tokens` positions in total, and at least one."""
    selected, total = [0], _num_positions(block_inputs.hidden[0])
    for batch in range(1, len(block_inputs)):
        total += _num_positions(block_inputs.hidden[batch])
        if total > tokens:
            break
        selected.append(batch)
    return selected


def _num_positions(hidden: Tensor) -> int:
    return hidden.shape[:-1].numel()


@contextmanager
def trial_weights(
    group: LayerGroup, weights: Sequence[Tensor], transform: InputTransform | None = None
) -> Iterator[None]:
    """Set the group's weights and transform its inputs inside the context; restore both bit for bit afterwards."""
    original = [layer.weight.detach().clone() for layer in group.layers]
    hooks = []
    if transform is not None:
        transformed = _cache_last(transform)
        hooks = [
            layer.module.register_forward_pre_hook(lambda _, args: (transformed(args[0]),)) for layer in group.layers
        ]
    try:
        _write(group, weights)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _write(group, original)


def _cache_last(transform: InputTransform) -> InputTransform:
    """Cache the last result, for layers that receive the same tensor one after the other."""
    last: list[Tensor] = []

    def transformed(x: Tensor) -> Tensor:
        if not last or last[0] is not x:
            last[:] = [x, transform(x)]
        return last[1]

    return transformed


@torch.no_grad()
def _write(group: LayerGroup, weights: Sequence[Tensor]) -> None:
    for layer, weight in zip(group.layers, weights, strict=True):
        layer.weight.copy_(weight)


class OutputError(ABC):
    """Output error of the module around a layer group, against its outputs with the initial weights."""

    reference: list[Tensor]  # [unmasked tokens, outputs] per batch

    @abstractmethod
    def outputs(self, weights: Sequence[Tensor], transform: InputTransform | None = None) -> Iterator[Tensor]:
        """Yield the outputs with these weights, batch by batch."""

    @torch.no_grad()
    def error(self, weights: Sequence[Tensor], transform: InputTransform | None = None) -> float:
        """Return the mean squared error against the initial outputs."""
        pairs = zip(self.outputs(weights, transform), self.reference, strict=True)
        total = sum(
            float((output.float() - expected.float()).square().sum(dtype=torch.float64)) for output, expected in pairs
        )
        return total / max(1, sum(expected.numel() for expected in self.reference))


class LayerOutputError(OutputError):
    """Error at the output of a single layer, from its recorded inputs."""

    def __init__(self, block_inputs: BlockInputs, block: Block, group: LayerGroup, tokens: int) -> None:
        (layer,) = group.layers
        batches = first_batches(block_inputs, tokens)
        self.inputs = [rows for rows, _ in _module_io(block_inputs, block, layer.module, batches)]
        self.reference = list(self.outputs([layer.weight]))

    @torch.no_grad()
    def outputs(self, weights: Sequence[Tensor], transform: InputTransform | None = None) -> Iterator[Tensor]:
        for x in self.inputs:
            yield F.linear(x if transform is None else transform(x), weights[0].to(x.dtype))


class ModuleOutputError(OutputError):
    """Error of input projections at the part's output projection, where the forward pass stops."""

    def __init__(self, block_inputs: BlockInputs, block: Block, group: LayerGroup, tokens: int) -> None:
        self.block_inputs, self.block, self.group = block_inputs, block, group
        self.batches = first_batches(block_inputs, tokens)
        before = [part.owner for part in block.parts if part.kind == "heads" and part is not group.part]
        self.attention: nn.Module | None = before[0] if before else None
        self.attention_outputs: list[Any] = []
        with _record_outputs(self.attention, self.attention_outputs):
            self.reference = list(self._outputs())

    def outputs(self, weights: Sequence[Tensor], transform: InputTransform | None = None) -> Iterator[Tensor]:
        with trial_weights(self.group, weights, transform), _replay_outputs(self.attention, self.attention_outputs):
            yield from self._outputs()

    def _outputs(self) -> Iterator[Tensor]:
        for _, output in _module_io(self.block_inputs, self.block, self.group.output_module, self.batches):
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
    def mean_square(self) -> float:
        """Return the mean square of the initial outputs."""
        total = sum(float(expected.float().square().sum(dtype=torch.float64)) for expected in self.reference)
        return total / sum(expected.numel() for expected in self.reference)


@torch.no_grad()
def _module_io(
    block_inputs: BlockInputs, block: Block, module: nn.Module, batches: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the input and output of a module of the block, batch by batch, unmasked tokens only.

    The forward pass stops there. Batches that do not reach the module (an expert) are skipped.
    """
    recorded: list[tuple[Tensor, Tensor]] = []

    def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        recorded.append((args[0], output))
        raise StopForward

    for batch in batches:
        with track_routing(block.module) as routing:
            handle = module.register_forward_hook(after)
            try:
                with suppress(StopForward):
                    block_inputs.run(block.module, block.index, batch)
            finally:
                handle.remove()
        for states in (recorded.pop() for _ in range(len(recorded))):
            inputs, outputs = (routing.unpadded_rows(module, state, block_inputs.masks[batch]) for state in states)
            yield inputs, outputs


@contextmanager
def _record_outputs(module: nn.Module | None, outputs: list[Any]) -> Iterator[None]:
    """Record the outputs of a module."""
    if module is None:
        yield
        return
    handle = module.register_forward_hook(lambda _, args, output: outputs.append(output))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _replay_outputs(module: Any, outputs: list[Any]) -> Iterator[None]:
    """Replay recorded outputs of a module, call by call."""
    if module is None:
        yield
        return
    replay = iter(outputs)
    module.forward = lambda *args, **kwargs: next(replay)
    try:
        yield
    finally:
        del module.forward
