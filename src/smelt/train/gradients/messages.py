"""Each worker sends what it has to say itself, and everyone adds up what all said.

The older convention (SAGE's first code, DGC, GRACE): a worker's memory is emptied only where it spoke itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from smelt.train.gradients import values as coding
from smelt.train.gradients.compressor import Coder, Message, Step
from smelt.train.gradients.control_flags import Marks
from smelt.train.gradients.index_exchange import Agreed


def gather_pairs(agreed: Agreed, step: Step, code: str) -> tuple[Tensor, Tensor, int, int]:
    """The sum of all pairs [elements], the indices this worker sent, |I|, and bytes of padding among the values."""
    workers, memory = step.workers, step.memory
    own = agreed.indices
    longest = max((len(found) for found in agreed.lists), default=0)
    data = coding.encode(functional.pad(memory[own], (0, longest - len(own))), code)
    gathered = workers.gather(data, "values")
    summed, seen = torch.zeros_like(memory), torch.zeros_like(memory, dtype=torch.bool)
    for rank, (row, found) in enumerate(zip(gathered, agreed.lists, strict=True)):
        values = coding.decode(row, longest, code)[: len(found)]
        summed.index_add_(0, found, values)
        seen[found] = True
        if rank == workers.rank:
            memory[own] -= values
    others = (coding.size_of(len(found), code) for rank, found in enumerate(agreed.lists) if rank != workers.rank)
    padding = (workers.size - 1) * coding.size_of(longest, code) - sum(others)
    return summed, own, int(seen.sum()), padding


def gather_messages(message: Message, coder: Coder, step: Step, marks: Marks) -> tuple[Tensor, Tensor, int, int] | None:
    """The sum of all messages [elements], what this worker's own says, |I|, and bytes of padding.

    None when somebody's gradient is not finite.
    """
    workers, memory, layout = step.workers, step.memory, step.layout
    gathered = workers.gather(torch.cat([marks.encode(memory.device), message.fixed]), "values")
    if not marks.all_finite(gathered):
        return None
    fixed = gathered[:, marks.size :]
    sizes = [coder.variable_size(row, layout) for row in fixed]
    longest = max(sizes)
    variable = workers.gather(functional.pad(message.variable, (0, longest - len(message.variable))), "values")
    allowed = marks.allowed(gathered, layout)
    summed, own = torch.zeros_like(memory), torch.zeros_like(memory)
    seen = torch.zeros_like(memory, dtype=torch.bool)
    for rank, size in enumerate(sizes):
        said = coder.decode(fixed[rank], variable[rank, :size], layout)
        if allowed is not None:
            said = said * allowed[:-1]
        summed += said
        seen |= said != 0
        if rank == workers.rank:
            own = said
    padding = (workers.size - 1) * longest - (sum(sizes) - sizes[workers.rank])
    return summed, own, int(seen.sum()), padding
