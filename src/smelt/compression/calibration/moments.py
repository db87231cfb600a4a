"""First and second moments of what enters the output projection of each part of a block."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.compression.calibration.routes import routed
from smelt.compression.calibration.stream import Stream, watching
from smelt.models.anatomy import Block


@dataclass(frozen=True)
class Moments:
    """Mean and mean square of every input of a projection, over all real tokens: [inputs] each."""

    mean: Tensor
    square: Tensor

    @property
    def variance(self) -> Tensor:
        return (self.square - self.mean**2).clamp(min=0)


@torch.no_grad()
def block_moments(stream: Stream, block: Block, *, carry: bool = False) -> list[Moments]:
    """The moments of every part of a block on the stream's current hidden states; with `carry`, the stream goes on.

    Those of an expert are over the tokens that reach it, and zero where none does.
    """
    device = next(block.module.parameters()).device
    sums = [torch.zeros(2, part.output.in_features, dtype=torch.float64, device=device) for part in block.parts]
    rows = torch.zeros(len(block.parts), dtype=torch.long, device=device)
    for batch in range(len(stream)):
        seen: list[dict[str, Tensor]] = [{} for _ in block.parts]
        with ExitStack() as stack:
            for part, note in zip(block.parts, seen, strict=True):
                stack.enter_context(watching(part.output.module, note))
            routes = stack.enter_context(routed(block.module))
            output = stream.run(block.module, block.index, batch)
        mask = stream.masks[batch]
        counts = []
        for part, total, note in zip(block.parts, sums, seen, strict=True):
            if "input" not in note:  # an expert that no token of the batch reaches
                counts.append(0)
                continue
            inputs = note["input"].movedim(1, -1) if part.kind == "channels" else note["input"]
            inputs = routes.real(part.output.module, inputs, mask)  # [rows, inputs]
            total[0] += inputs.sum(0, dtype=torch.float64)
            total[1] += inputs.square().sum(0, dtype=torch.float64)
            counts.append(len(inputs))
        rows += torch.tensor(counts, device=device)
        if carry:
            stream.hidden[batch] = output
    return [Moments(total[0] / count, total[1] / count) for total, count in zip(sums, rows.clamp(min=1), strict=True)]
