"""Exchange of selected indices, (index, value) pairs and encoded gradients between ranks.

Status flags travel beside every selection: whether the gradients are finite, and which parameters had any.

With "union", "exclusive", "leader" and "known" all ranks arrive at one set of indices and each clears its residual
there, also where another rank selected. With "own" and with encoded gradients (SAGE's first code, DGC, GRACE) each rank
sends its own message, all ranks sum all messages, and a residual is cleared only where its rank itself has sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from smelt.train.gradients import encoding
from smelt.train.gradients.compressor import CompressionStep, EncodedGradient, GradientEncoder, SelectedIndices
from smelt.train.gradients.layout import BucketLayout

_FLAG_SIZE = 4  # bytes


@dataclass(frozen=True)
class StatusFlags:
    """The flags of one rank."""

    finite: Callable[[], Tensor]  # [] bool; evaluated when it is sent
    used: Tensor | None  # [slices] bool; None: all are

    def encode(self, device: torch.device) -> Tensor:
        flag = self.finite().to(device, torch.int32).view(1).view(torch.uint8)
        return flag if self.used is None else torch.cat([flag, encoding.pack_bits(self.used.to(device))])

    @property
    def size(self) -> int:
        """Encoded bytes."""
        return _FLAG_SIZE + (0 if self.used is None else encoding.packed_size(len(self.used)))

    def all_finite(self, gathered: Tensor) -> Tensor:
        """[world_size, bytes] -> [] bool"""
        return (gathered[:, :_FLAG_SIZE].clone(memory_format=torch.contiguous_format).view(torch.int32) > 0).all()

    def used_mask(self, gathered: Tensor, layout: BucketLayout) -> Tensor | None:
        """[world_size, bytes] -> [numel + 1] bool: where any rank has a gradient; None: everywhere.

        DDP drops the result for a parameter that no rank used, so its residual must not be sent.
        """
        if self.used is None:
            return None
        rows = [encoding.unpack_bits(row[_FLAG_SIZE:], len(self.used)) for row in gathered]
        used = torch.stack(rows).any(dim=0)  # [slices]
        sizes = torch.tensor([part.numel for part in layout.slices], device=gathered.device)
        mask = torch.repeat_interleave(used, sizes, output_size=layout.numel)
        return torch.cat([mask, mask.new_zeros(1)])


class DeferredStatus:
    """Numbers that the device computes in this step and the host reads in the next one, without a sync."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers


@dataclass(frozen=True)
class ExchangedIndices:
    """What all ranks know after the exchange."""

    finite: bool  # always true with a fixed capacity, where it is not known yet
    indices: Tensor  # [count] int64: what all ranks send; with "own" what this rank sends
    dense: Tensor  # [count] int64: what all ranks send in addition
    per_rank: list[Tensor]  # [count] int64 of every rank; with "own" only
    counts: list[int]  # how many elements each rank selected
    padded_count: int  # what the all-gather was padded to, over all ranks
    padding: int  # bytes of padding
    deferred: Tensor  # with a fixed capacity: [world_size + 2] int64, the counts, |I| and whether all is finite


def exchange_indices(
    selected: SelectedIndices, mode: str, step: CompressionStep, flags: StatusFlags, blocks: int
) -> ExchangedIndices:
    """Exchange counts first, then indices padded to the longest selection."""
    comm, device = step.comm, step.residual.device
    own_count = torch.tensor([len(selected.indices)], device=device)
    numbers = torch.cat([own_count, encoding.count_per_block(selected.indices, blocks)]).to(torch.int32)
    gathered = comm.all_gather(torch.cat([flags.encode(device), numbers.view(torch.uint8)]), "counts")
    finite = bool(flags.all_finite(gathered))
    heads = _as_int32(gathered[:, flags.size :]).long().cpu()  # [world_size, 1 + blocks]
    counts = heads[:, 0].tolist()
    if not finite:
        empty = selected.indices[:0]
        return ExchangedIndices(False, empty, empty, [], counts, 0, 0, empty)
    per_rank, padded_count, padding = [selected.indices], 0, 0
    if mode == "leader":
        per_rank = [_broadcast_from_leader(selected.indices, step, heads, blocks)]
    elif mode != "known":
        longest = max(counts)
        rows = comm.all_gather(encoding.encode_indices(selected.indices, longest, blocks), "indices")
        per_rank = [encoding.decode_indices(row, head[0], head[1:]) for row, head in zip(rows, heads, strict=True)]
        padded_count = comm.world_size * longest
        others = sum(counts) - counts[comm.rank]
        padding = ((comm.world_size - 1) * longest - others) * encoding.index_width(blocks)
    mask = flags.used_mask(gathered, step.layout)
    per_rank = [_masked(indices, mask) for indices in per_rank]
    dense = torch.empty(0, dtype=torch.int64, device=device) if selected.dense is None else selected.dense
    if mode == "exclusive" and device.type == "cpu":  # disjoint ranges, so sorting them sorts all indices
        per_rank.sort(key=lambda indices: int(indices[0]) if len(indices) else -1)
    shared = per_rank[comm.rank] if mode == "own" else torch.cat(per_rank)
    if mode == "union":
        shared = torch.unique(shared)
    return ExchangedIndices(True, shared, _masked(dense, mask), per_rank, counts, padded_count, padding, torch.empty(0))


def exchange_fixed_capacity(selected: SelectedIndices, step: CompressionStep, flags: StatusFlags) -> ExchangedIndices:
    """Exchange one message of fixed size; shorter selections are padded with `numel`, which is no valid index.

    In a union an element that several ranks selected occurs several times, each time with the same sum.
    """
    assert step.capacity is not None
    comm, device, invalid = step.comm, step.residual.device, len(step.residual)
    missing = max(step.capacity - len(selected.indices), 0)
    own = functional.pad(selected.indices[: step.capacity], (0, missing), value=invalid)
    message = torch.cat([flags.encode(device), own.to(torch.int32).view(torch.uint8)])
    gathered = comm.all_gather(message, "indices")
    shared = _as_int32(gathered[:, flags.size :]).long()  # [world_size, capacity]
    counts = (shared < invalid).sum(dim=1)
    mask = flags.used_mask(gathered, step.layout)
    if mask is not None:
        shared = torch.where(mask[shared], shared, invalid)
    indices = shared.flatten()
    if selected.dense is not None:
        indices = torch.cat([indices, selected.dense])
    sent = torch.zeros(invalid + 1, dtype=torch.bool, device=device)
    sent.index_fill_(0, indices, True)  # `sent[indices] = True` would synchronize
    deferred = torch.cat([counts, sent[:invalid].sum()[None], flags.all_finite(gathered).long()[None]])
    empty = indices[:0]
    return ExchangedIndices(True, indices, empty, [], [], comm.world_size * step.capacity, 0, deferred)


def all_gather_pairs(
    exchanged: ExchangedIndices, step: CompressionStep, wire_dtype: str
) -> tuple[Tensor, Tensor, int, int]:
    """Sum the (index, value) pairs of all ranks.

    Return the sum [numel], the indices this rank sent, |I|, and bytes of padding among the values.
    """
    comm, residual = step.comm, step.residual
    own = exchanged.indices
    longest = max((len(indices) for indices in exchanged.per_rank), default=0)
    data = encoding.encode_values(functional.pad(residual[own], (0, longest - len(own))), wire_dtype)
    gathered = comm.all_gather(data, "values")
    summed, sent = torch.zeros_like(residual), torch.zeros_like(residual, dtype=torch.bool)
    for rank, (row, indices) in enumerate(zip(gathered, exchanged.per_rank, strict=True)):
        values = encoding.decode_values(row, longest, wire_dtype)[: len(indices)]
        summed.index_add_(0, indices, values)
        sent[indices] = True
        if rank == comm.rank:
            residual[own] -= values
    sizes = [encoding.encoded_size(len(indices), wire_dtype) for indices in exchanged.per_rank]
    others = sum(sizes) - sizes[comm.rank]
    padding = (comm.world_size - 1) * encoding.encoded_size(longest, wire_dtype) - others
    return summed, own, int(sent.sum()), padding


def all_gather_encoded(
    message: EncodedGradient, encoder: GradientEncoder, step: CompressionStep, flags: StatusFlags
) -> tuple[Tensor, Tensor, int, int] | None:
    """Sum the encoded gradients of all ranks; None if a gradient is not finite on any rank.

    Return the sum [numel], this rank's own decoded gradient [numel], |I|, and bytes of padding.
    """
    comm, residual, layout = step.comm, step.residual, step.layout
    gathered = comm.all_gather(torch.cat([flags.encode(residual.device), message.fixed]), "values")
    if not flags.all_finite(gathered):
        return None
    fixed = gathered[:, flags.size :]
    sizes = [encoder.variable_size(row, layout) for row in fixed]
    longest = max(sizes)
    variable = comm.all_gather(functional.pad(message.variable, (0, longest - len(message.variable))), "values")
    mask = flags.used_mask(gathered, layout)
    summed, own = torch.zeros_like(residual), torch.zeros_like(residual)
    sent = torch.zeros_like(residual, dtype=torch.bool)
    for rank, size in enumerate(sizes):
        decoded = encoder.decode(fixed[rank], variable[rank, :size], layout)
        if mask is not None:
            decoded = decoded * mask[:-1]
        summed += decoded
        sent |= decoded != 0
        if rank == comm.rank:
            own = decoded
    padding = (comm.world_size - 1) * longest - (sum(sizes) - sizes[comm.rank])
    return summed, own, int(sent.sum()), padding


def _broadcast_from_leader(own: Tensor, step: CompressionStep, heads: Tensor, blocks: int) -> Tensor:
    leader = step.iteration % step.comm.world_size
    count = int(heads[leader, 0])
    indices = own if step.comm.rank == leader else own.new_zeros(count)
    data = step.comm.broadcast(encoding.encode_indices(indices, count, blocks), leader, "indices")
    return encoding.decode_indices(data, count, heads[leader, 1:])


def _masked(indices: Tensor, mask: Tensor | None) -> Tensor:
    return indices if mask is None else indices[mask[indices]]


def _as_int32(rows: Tensor) -> Tensor:
    """[world_size, 4 * count] uint8 -> [world_size, count] int32"""
    return rows.clone(memory_format=torch.contiguous_format).view(torch.int32)
