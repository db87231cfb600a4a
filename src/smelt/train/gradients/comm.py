"""The collectives that gradient compression uses, and the bytes that each of them moves.

Bytes are those that one rank receives when a collective runs as a ring: an all-gather of m bytes brings (n-1) m, an
all-reduce 2 (n-1)/n m, a reduce-scatter or an all-to-all (n-1)/n m, a broadcast m to every rank but its source. Every
byte of a step passes through this file, so values, indices, counts, scales and padding are all counted.
"""

from __future__ import annotations

import atexit
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as distributed
from torch import Tensor

from smelt.errors import ConfigError, ResourceError, SmeltError

_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # renamed in torch 2.13
_reduce_scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)

_GLOO_GRACE = 0.1  # seconds


class Comm:
    """The collectives of one process group; a single rank if `torch.distributed` is not initialized."""

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self.group = group
        initialized = distributed.is_available() and distributed.is_initialized()
        self.world_size = distributed.get_world_size(group) if initialized else 1
        self.rank = distributed.get_rank(group) if initialized else 0
        self.bytes_received: Counter[str] = Counter()  # by purpose
        self._supports_cpu = not initialized or "cpu" in distributed.get_backend_config(group)  # not with nccl alone
        if self.world_size > 1 and self._supports_cpu:
            _wait_for_gloo_at_exit()

    def all_gather(self, tensor: Tensor, purpose: str) -> Tensor:
        """Gather [...] of every rank into [world_size, ...] on the tensor's device; all shapes must be equal."""
        tensor = tensor.contiguous()
        if self.world_size == 1 or not tensor.numel():
            return tensor.expand(self.world_size, *tensor.shape).clone()
        own = tensor if self._supports_cpu else tensor.cuda()
        gathered = own.new_empty((self.world_size * tensor.numel(),))
        self._run_all_gather(_as_bytes(gathered), _as_bytes(own.flatten()))
        self._count(purpose, (self.world_size - 1) * _num_bytes(tensor))
        return gathered.view(self.world_size, *tensor.shape).to(tensor.device)

    def all_reduce(self, tensor: Tensor, purpose: str) -> Tensor:
        """Sum over all ranks in place; every rank gets the same bits."""
        if self.world_size > 1 and tensor.numel():
            self._run_all_reduce(tensor)
            self._count(purpose, 2 * (self.world_size - 1) * _num_bytes(tensor) // self.world_size)
        return tensor

    def reduce_scatter(self, rows: Tensor, purpose: str) -> Tensor:
        """Sum [world_size, ...] over all ranks and return this rank's row, [...]."""
        if self.world_size == 1 or not rows.numel():
            return rows[0].clone()
        summed = torch.empty_like(rows[0])
        _reduce_scatter(summed.view(-1), rows.contiguous().view(-1), group=self.group)
        self._count(purpose, (self.world_size - 1) * _num_bytes(rows) // self.world_size)
        return summed

    def broadcast(self, tensor: Tensor, source: int, purpose: str) -> Tensor:
        """Copy the tensor of rank `source` to all ranks, in place."""
        if self.world_size > 1 and tensor.numel():
            distributed.broadcast(_as_bytes(tensor), group=self.group, group_src=source)
            self._count(purpose, 0 if self.rank == source else _num_bytes(tensor))
        return tensor

    def all_to_all(self, rows: Tensor, purpose: str) -> Tensor:
        """Send row j to rank j: [world_size, ...] by receiver -> [world_size, ...] by sender."""
        if self.world_size == 1 or not rows.numel():
            return rows.clone()
        received = torch.empty_like(rows)
        self._run_all_to_all(_as_bytes(received.flatten()), _as_bytes(rows.flatten()))
        self._count(purpose, (self.world_size - 1) * _num_bytes(rows) // self.world_size)
        return received

    def require_equal(self, text: str, subject: str) -> None:
        """Raise on every rank unless all ranks pass the same text."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([len(own)]), "agreement").flatten().tolist()
        equal = len(set(lengths)) == 1
        if equal:
            texts = self.all_gather(own, "agreement")
            equal = bool((texts == texts[0]).all())
        if not equal:
            raise ConfigError(f"the ranks do not have the same {subject}; start all of them with the same one.")

    def _run_all_gather(self, gathered: Tensor, own: Tensor) -> None:
        _all_gather(gathered, own, group=self.group)

    def _run_all_reduce(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor, group=self.group)

    def _run_all_to_all(self, received: Tensor, rows: Tensor) -> None:
        distributed.all_to_all_single(received, rows, group=self.group)

    def _count(self, purpose: str, num_bytes: int) -> None:
        self.bytes_received[purpose] += num_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes that this rank received, by purpose, and the counts behind the densities that papers report."""

    counts: int = 0  # bytes: how many elements each rank selected, and whether its gradients are finite
    plan: int = 0  # bytes: which rank selects where (DEFT), sampled thresholds
    indices: int = 0  # bytes
    values: int = 0  # bytes
    padding: int = 0  # bytes of `indices` and `values` that are padding
    numel: int = 0  # elements of the bucket
    target_count: float = 0.0  # elements that the density asks for
    num_selected: int = 0  # elements that were sent, |I|; an element that several ranks send counts once
    padded_count: int = 0  # world_size times the longest selection: what the all-gather of indices is padded to
    intra_node: int = 0  # bytes from ranks of the same node if there are nodes; not part of `bytes`

    @property
    def bytes(self) -> int:
        return self.counts + self.plan + self.indices + self.values

    @property
    def density(self) -> float:
        return self.num_selected / self.numel if self.numel else 0.0

    @property
    def build_up(self) -> float:
        """|I| / (d G): 1 if as many are sent as the density asks for, up to world_size if all selections differ."""
        return self.num_selected / self.target_count if self.target_count else 0.0

    @property
    def padding_overhead(self) -> float:
        """n max_r(k_r) / |I| - 1: the share that padding adds to the all-gather of indices."""
        return self.padded_count / self.num_selected - 1 if self.num_selected else 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def new_subgroup(ranks: Sequence[int], parent: distributed.ProcessGroup | None = None) -> distributed.ProcessGroup:
    """Create a group of these global ranks with the timeout of `parent`; only its members call this.

    PyTorch would otherwise wait half an hour for a rank that does not answer, whatever the timeout of the run.
    """
    group = distributed.new_group(list(ranks), timeout=group_timeout(parent), use_local_synchronization=True)
    assert isinstance(group, distributed.ProcessGroup)
    return group


def group_timeout(group: distributed.ProcessGroup | None = None) -> timedelta:
    """Return the timeout of a group's collectives; None: of the default group."""
    group = group or distributed.group.WORLD
    assert group is not None
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def run_on_all_ranks(comm: Comm, work: Callable[[], object], message: str) -> None:
    """Run `work` on every rank; if it fails on one, the others raise a ResourceError with `message`."""
    failure: SmeltError | None = None
    try:
        work()
    except SmeltError as error:
        failure = error
    any_failed = comm.all_gather(torch.tensor([failure is not None]), "agreement").any()
    if failure is not None:
        raise failure
    if any_failed:
        raise ResourceError(message)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _as_bytes(tensor: Tensor) -> Tensor:
    """View the same memory as bytes, which every backend can send whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


@cache
def _wait_for_gloo_at_exit() -> None:
    """Let gloo's threads release their last collectives before the interpreter ends.

    A collective of a backward pass holds a Python object. A thread of gloo that releases it while the interpreter ends
    aborts the process, although all of its work is done.
    """
    atexit.register(time.sleep, _GLOO_GRACE)
