"""The timeline of a sharded network as it really is: what `predict` says of a plan, measured.

Collectives are those that FSDP2 calls, through its own place for another gather and scatter; computing is told by hooks
around the layers of a unit. On a GPU moments are events in the streams that do the work. What the root computes after
the last unit is counted as its own; what it computes elsewhere is seen as time in which nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from smelt.errors import ConfigError
from smelt.train.fsdp.apply import modules_of_units
from smelt.train.fsdp.facts import ModelProfile
from smelt.train.fsdp.plan import ShardingPlan
from smelt.train.fsdp.timeline import COMPUTING, FORWARD, GATHER, REST, SCATTER, Timeline, TimelineEvent
from smelt.train.fsdp.watch import Clock, watch

_WARM_UP, _REPEATS = 2, 3
_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # renamed in torch 2.13
_reduce_scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)


def measure_timeline(
    plan: ShardingPlan, model: ModelProfile, network: nn.Module, step: Callable[[], object], device: torch.device
) -> Timeline:
    """The fastest of some steps on this worker. `step`: forward and backward of one batch; all workers call it."""
    if not isinstance(network, FSDPModule):
        raise ConfigError("the network is not sharded; apply a plan to it first.")
    for _ in range(_WARM_UP):
        step()
    found = [_Record(plan, model, network, device).step(step) for _ in range(_REPEATS)]
    return min(found, key=lambda each: each.seconds)


class _Record:
    """One step, written down."""

    def __init__(self, plan: ShardingPlan, model: ModelProfile, network: FSDPModule, device: torch.device) -> None:
        self._device = device
        units = dict(enumerate(modules_of_units(plan, model, cast(nn.Module, network))))
        self._units: dict[int, list[nn.Module]] = {REST: [cast(nn.Module, network)], **units}
        self._last = len(units) - 1
        self._open: list[tuple[str, int]] = []  # computing that has begun
        self._begun: dict[int, Any] = {}  # moments, by the number of the event
        self._ended: dict[int, Any] = {}
        self._kinds: list[tuple[str, int]] = []  # as they were issued

    def step(self, step: Callable[[], object]) -> Timeline:
        handles = []
        for number, members in self._units.items():
            note = partial(self._note, number)
            unit = cast(FSDPModule, members[0])
            unit.set_custom_all_gather(_Gather(note))
            unit.set_custom_reduce_scatter(_Scatter(note))
            handles += watch(members, note)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._clock = Clock(self._device)
        step()
        self._close()
        for handle in handles:
            handle.remove()
        for members in self._units.values():
            unit = cast(FSDPModule, members[0])
            unit.set_custom_all_gather(_Gather(_nobody))
            unit.set_custom_reduce_scatter(_Scatter(_nobody))
        peak = float(torch.cuda.max_memory_allocated(self._device)) if on_gpu else None
        return Timeline(tuple(self._events()), peak)

    def _note(self, unit: int, kind: str, begins: bool) -> None:
        if unit == REST and kind == FORWARD:  # begins where the last unit has ended
            if not begins:
                self._end_of_forward = self._clock.now()
            return
        if begins:
            self._begin(unit, kind)
        else:
            self._end(unit, kind)

    def _begin(self, unit: int, kind: str) -> None:
        if kind in COMPUTING and (kind, unit) in self._kinds:
            return  # another of its outputs
        self._close()
        self._begun[len(self._kinds)] = self._clock.now()
        self._kinds.append((kind, unit))
        if kind in COMPUTING:
            self._open.append((kind, unit))

    def _end(self, unit: int, kind: str) -> None:
        if (kind, unit) in self._open or kind not in COMPUTING:
            place = len(self._kinds) - 1 - self._kinds[::-1].index((kind, unit))
            self._ended[place] = self._clock.now()

    def _close(self) -> None:
        """Something else begins: what was computed has ended, at the latest now."""
        for kind, unit in self._open:
            place = self._kinds.index((kind, unit))
            self._ended.setdefault(place, self._clock.now())
        self._open.clear()

    def _events(self) -> Sequence[TimelineEvent]:
        read = self._clock.seconds
        events = []
        for place, (kind, unit) in enumerate(self._kinds):
            events.append(TimelineEvent(kind, unit, read(self._begun[place]), read(self._ended[place])))
            if (kind, unit) == (FORWARD, self._last):
                events.append(TimelineEvent(FORWARD, REST, events[-1].end, read(self._end_of_forward)))
        first = min(event.start for event in events)
        return [TimelineEvent(event.kind, event.unit, event.start - first, event.end - first) for event in events]


def _nobody(kind: str, begins: bool) -> None:
    """Nothing is written down."""


class _Gather(AllGather):
    def __init__(self, note: Callable[[str, bool], None]) -> None:
        self._note = note

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, async_op: bool = False
    ) -> distributed.Work | None:
        self._note(GATHER, True)
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self._note(GATHER, False)
        return cast("distributed.Work | None", work)


class _Scatter(ReduceScatter):
    def __init__(self, note: Callable[[str, bool], None]) -> None:
        self._note = note

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> distributed.Work | None:
        self._note(SCATTER, True)
        work = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._note(SCATTER, False)
        return cast("distributed.Work | None", work)
