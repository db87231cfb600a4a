"""First and second moments of the inputs of each part's output projection."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.compression.calibration.block_inputs import BlockInputs, record_io
from smelt.compression.calibration.expert_routing import track_routing
from smelt.models.anatomy import Block


@dataclass(frozen=True)
class Moments:
    """Mean and mean square of every input of a projection over all unpadded tokens: [inputs] each."""

    mean: Tensor
    square: Tensor

    @property
    def variance(self) -> Tensor:
        return (self.square - self.mean**2).clamp(min=0)


@torch.no_grad()
def block_moments(block_inputs: BlockInputs, block: Block, *, advance: bool = False) -> list[Moments]:
    """Return the moments of every part of a block; with `advance`, also advance the inputs to the next block.

    The moments of an expert are over the tokens routed to it, and zero if there are none.
    """
    device = next(block.module.parameters()).device
    sums = [torch.zeros(2, part.output.in_features, dtype=torch.float64, device=device) for part in block.parts]
    rows = torch.zeros(len(block.parts), dtype=torch.long, device=device)
    for batch in range(len(block_inputs)):
        recorded: list[dict[str, Tensor]] = [{} for _ in block.parts]
        with ExitStack() as stack:
            for part, record in zip(block.parts, recorded, strict=True):
                stack.enter_context(record_io(part.output.module, record))
            routing = stack.enter_context(track_routing(block.module))
            output = block_inputs.run(block.module, block.index, batch)
        mask = block_inputs.masks[batch]
        counts = []
        for part, total, record in zip(block.parts, sums, recorded, strict=True):
            if "input" not in record:  # an expert that no token of the batch reaches
                counts.append(0)
                continue
            inputs = record["input"].movedim(1, -1) if part.kind == "channels" else record["input"]
            inputs = routing.unpadded_rows(part.output.module, inputs, mask)  # [rows, inputs]
            total[0] += inputs.sum(0, dtype=torch.float64)
            total[1] += inputs.square().sum(0, dtype=torch.float64)
            counts.append(len(inputs))
        rows += torch.tensor(counts, device=device)
        if advance:
            block_inputs.advance(batch, output)
    return [Moments(total[0] / count, total[1] / count) for total, count in zip(sums, rows.clamp(min=1), strict=True)]
