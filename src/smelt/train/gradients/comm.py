"""The workers of a run as the compressors see them: five collectives, each of which counts what arrives here.

Bytes are those that reach one worker when a collective runs as a ring: an all-gather of m bytes brings (n-1) m, an
all-reduce 2 (n-1)/n m, a reduce-scatter or an all-to-all (n-1)/n m, a broadcast m to everyone but its source. Every
byte of a step passes through this file, so the account is of what really travels: values, indices, counts, scales and
padding alike.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as distributed
from torch import Tensor

from smelt.errors import ConfigError

_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # renamed in torch 2.13
_reduce_scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)


class Workers:
    """A process group, or one worker alone where none was started."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self.group = group
        started = distributed.is_available() and distributed.is_initialized()
        self.size = distributed.get_world_size(group) if started else 1
        self.rank = distributed.get_rank(group) if started else 0
        self.arrived: Counter[str] = Counter()  # bytes, by what they were for
        self._carries_cpu = not started or "cpu" in distributed.get_backend_config(group)  # nccl alone does not

    def gather(self, tensor: Tensor, purpose: str) -> Tensor:
        """[...] of every worker -> [workers, ...], where it was; all must bring the same shape."""
        tensor = tensor.contiguous()
        if self.size == 1 or not tensor.numel():
            return tensor.expand(self.size, *tensor.shape).clone()
        own = tensor if self._carries_cpu else tensor.cuda()
        gathered = own.new_empty((self.size * tensor.numel(),))
        self._all_gather(_bytes(gathered), _bytes(own.flatten()))
        self._count(purpose, (self.size - 1) * _size(tensor))
        return gathered.view(self.size, *tensor.shape).to(tensor.device)

    def sum(self, tensor: Tensor, purpose: str) -> Tensor:
        """The sum over all workers, in place, the same bits on each of them."""
        if self.size > 1 and tensor.numel():
            self._all_reduce(tensor)
            self._count(purpose, 2 * (self.size - 1) * _size(tensor) // self.size)
        return tensor

    def scatter_sum(self, rows: Tensor, purpose: str) -> Tensor:
        """[workers, ...] of every worker -> [...]: the sum over all workers of the row that is this one's."""
        if self.size == 1 or not rows.numel():
            return rows[0].clone()
        summed = torch.empty_like(rows[0])
        _reduce_scatter(summed.view(-1), rows.contiguous().view(-1), group=self.group)
        self._count(purpose, (self.size - 1) * _size(rows) // self.size)
        return summed

    def broadcast(self, tensor: Tensor, source: int, purpose: str) -> Tensor:
        """The tensor of one worker on all of them, in place."""
        if self.size > 1 and tensor.numel():
            distributed.broadcast(_bytes(tensor), group=self.group, group_src=source)
            self._count(purpose, 0 if self.rank == source else _size(tensor))
        return tensor

    def exchange(self, rows: Tensor, purpose: str) -> Tensor:
        """Row j goes to worker j: [workers, ...] by receiver -> [workers, ...] by sender."""
        if self.size == 1 or not rows.numel():
            return rows.clone()
        arrived = torch.empty_like(rows)
        self._all_to_all(_bytes(arrived.flatten()), _bytes(rows.flatten()))
        self._count(purpose, (self.size - 1) * _size(rows) // self.size)
        return arrived

    def require_equal(self, text: str, what: str) -> None:
        """Refuse, on every worker, to go on when they were not all given the same."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(own)]), "agreement").flatten().tolist()
        same = len(set(lengths)) == 1
        if same:
            texts = self.gather(own, "agreement")
            same = bool((texts == texts[0]).all())
        if not same:
            raise ConfigError(f"the workers do not have the same {what}; start all of them with the same one.")

    def _all_gather(self, gathered: Tensor, own: Tensor) -> None:
        _all_gather(gathered, own, group=self.group)

    def _all_reduce(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor, group=self.group)

    def _all_to_all(self, arrived: Tensor, rows: Tensor) -> None:
        distributed.all_to_all_single(arrived, rows, group=self.group)

    def _count(self, purpose: str, size: int) -> None:
        self.arrived[purpose] += size


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes, which every backend can carry whatever the type."""
    return tensor.view(-1).view(torch.uint8)
