"""The teacher of a repair: a copy of a block as it was, and the residual sums its parts should reach."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from smelt.compression.calibration.masks import apply_mask
from smelt.compression.calibration.stream import Stream, watching
from smelt.models.anatomy import Block
from smelt.models.families import Residual


@dataclass(frozen=True)
class Lesson:
    """What a teacher gave on one batch: the block's output, and for each part the residual plus what it adds."""

    output: Tensor
    sums: list[Tensor]


class Teacher:
    """A block before it was cut. With an assistant's masks its stream is carried masked; the feed-forward's target then
    has all its filters on that stream, as in the released code."""

    def __init__(self, block: Block, residual: Residual, masks: dict[str, Tensor] | None = None) -> None:
        inside = len(block.path) + 1
        self.module = copy.deepcopy(block.module)
        self.parts, self.residual = block.parts, residual
        self.outputs = [self.module.get_submodule(part.output.path[inside:]) for part in block.parts]
        writers = block.parts[-1].input_projections
        self.last_writer = self.module.get_submodule(writers[0].path[inside:]) if writers else None
        self.masks = None if masks is None else [masks[part.name] for part in block.parts]

    def teach(self, stream: Stream, index: int, batch: int) -> Lesson:
        """Run the block on the stream's hidden states."""
        hidden = stream.hidden[batch]
        seen: list[dict[str, Tensor]] = [{} for _ in self.parts]
        written: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for position, module in enumerate(self.outputs):
                stack.enter_context(watching(module, seen[position]))
                if self.masks is not None:
                    hook = module.register_forward_pre_hook(self._masking(position))
                    stack.callback(hook.remove)
            if self.last_writer is not None:
                stack.enter_context(watching(self.last_writer, written))
            output = stream.run(self.module, index, batch)
        first = hidden + seen[0]["output"].view(hidden.shape)
        if len(self.parts) == 1:
            return Lesson(output, [first])
        before = written["input"].view(hidden.shape) if self.residual == "post" else first
        full = seen[-1]["output"] if self.masks is None else self.outputs[-1](seen[-1]["input"])
        return Lesson(output, [first, before + full.view(hidden.shape)])

    def _masking(self, position: int) -> Any:
        """A hook that comes after the watching one, so that what was seen is unmasked."""
        assert self.masks is not None
        part, mask = self.parts[position], self.masks[position]

        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (apply_mask(part, mask, args[0]), *args[1:])

        return hook
