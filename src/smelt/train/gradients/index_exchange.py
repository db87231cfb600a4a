"""The workers tell each other what they chose, and come to one set of indices.

Every worker then empties its memory at the same places, also at those that another one chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from smelt.train.gradients import indices as coding
from smelt.train.gradients.compressor import Chosen, Step
from smelt.train.gradients.control_flags import Marks


@dataclass(frozen=True)
class Agreed:
    """What all workers know after they have talked."""

    finite: bool  # with slots it is not known yet, and true
    indices: Tensor  # [count] int64: what all send; of the route "own" what this worker sends
    common: Tensor  # [count] int64: what all send besides
    lists: list[Tensor]  # of every worker [count] int64; of the route "own" only
    counts: list[int]  # how many each worker chose
    slots: int  # what the gather was padded to, of all workers
    padding: int  # bytes that carried nothing
    late: Tensor  # with slots: [workers + 2] int64, the counts, |I| and whether all is finite


def agree(chosen: Chosen, route: str, step: Step, marks: Marks, blocks: int) -> Agreed:
    """Counts first, then indices padded to the longest selection."""
    workers, device = step.workers, step.memory.device
    own = torch.tensor([len(chosen.indices)], device=device)
    numbers = torch.cat([own, coding.block_counts(chosen.indices, blocks)]).to(torch.int32)
    gathered = workers.gather(torch.cat([marks.encode(device), numbers.view(torch.uint8)]), "counts")
    finite = bool(marks.all_finite(gathered))
    heads = (
        gathered[:, marks.size :].clone(memory_format=torch.contiguous_format).view(torch.int32).long().cpu()
    )  # [workers, 1 + blocks]
    counts = heads[:, 0].tolist()
    if not finite:
        nothing = chosen.indices[:0]
        return Agreed(False, nothing, nothing, [], counts, 0, 0, nothing)
    lists, slots, padding = [chosen.indices], 0, 0
    if route == "leader":
        lists = [_from_leader(chosen.indices, step, heads, blocks)]
    elif route != "known":
        longest = max(counts)
        coded = workers.gather(coding.encode(chosen.indices, longest, blocks), "indices")
        lists = [coding.decode(row, head[0], head[1:]) for row, head in zip(coded, heads, strict=True)]
        slots = workers.size * longest
        others = sum(counts) - counts[workers.rank]
        padding = ((workers.size - 1) * longest - others) * coding.width(blocks)
    allowed = marks.allowed(gathered, step.layout)
    lists = [_within(found, allowed) for found in lists]
    common = torch.empty(0, dtype=torch.int64, device=device) if chosen.common is None else chosen.common
    if route == "exclusive" and device.type == "cpu":  # ranges that do not overlap: in their order all is in order
        lists.sort(key=lambda found: int(found[0]) if len(found) else -1)
    shared = lists[workers.rank] if route == "own" else torch.cat(lists)
    if route == "union":
        shared = torch.unique(shared)
    return Agreed(True, shared, _within(common, allowed), lists, counts, slots, padding, torch.empty(0))


def agree_in_slots(chosen: Chosen, step: Step, marks: Marks) -> Agreed:
    """One message of fixed length; whoever chose fewer fills up with the number of elements, which is nobody's index.

    Of a union what several workers chose stands there several times: each time with the same sum.
    """
    assert step.slots is not None
    workers, device, nobody = step.workers, step.memory.device, len(step.memory)
    own = functional.pad(chosen.indices[: step.slots], (0, max(step.slots - len(chosen.indices), 0)), value=nobody)
    message = torch.cat([marks.encode(device), own.to(torch.int32).view(torch.uint8)])
    gathered = workers.gather(message, "indices")
    shared = (
        gathered[:, marks.size :].clone(memory_format=torch.contiguous_format).view(torch.int32).long()
    )  # [workers, slots]
    counts = (shared < nobody).sum(dim=1)
    allowed = marks.allowed(gathered, step.layout)
    if allowed is not None:
        shared = torch.where(allowed[shared], shared, nobody)
    indices = shared.flatten()
    if chosen.common is not None:
        indices = torch.cat([indices, chosen.common])
    seen = torch.zeros(nobody + 1, dtype=torch.bool, device=device)
    seen.index_fill_(0, indices, True)  # `seen[indices] = True` would wait for the device
    late = torch.cat([counts, seen[:nobody].sum()[None], marks.all_finite(gathered).long()[None]])
    empty = indices[:0]
    return Agreed(True, indices, empty, [], [], workers.size * step.slots, 0, late)


def _from_leader(own: Tensor, step: Step, heads: Tensor, blocks: int) -> Tensor:
    leader = step.number % step.workers.size
    count = int(heads[leader, 0])
    mine = own if step.workers.rank == leader else own.new_zeros(count)
    coded = step.workers.broadcast(coding.encode(mine, count, blocks), leader, "indices")
    return coding.decode(coded, count, heads[leader, 1:])


def _within(indices: Tensor, allowed: Tensor | None) -> Tensor:
    return indices if allowed is None else indices[allowed[indices]]
