"""Measure the timeline of a sharded network: the counterpart of `predict_timeline`.

Collectives are traced through FSDP2's custom all-gather and reduce-scatter, compute through hooks around the layers of
a unit. On a GPU timestamps are events in the streams that do the work. The root's compute after the last unit is
attributed to the root; what it computes elsewhere shows as time without compute.
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
from smelt.train.fsdp.hooks import Callback, add_hooks
from smelt.train.fsdp.parallelize import find_unit_modules
from smelt.train.fsdp.plan import ModelProfile, ShardingPlan
from smelt.train.fsdp.timeline import ALL_GATHER, COMPUTE, FORWARD, REDUCE_SCATTER, ROOT, StepTimeline, TimelineEvent
from smelt.train.timing import DeviceClock, Timestamp

_WARMUP_STEPS, _REPEATS = 2, 3
_all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # renamed in torch 2.13
_reduce_scatter = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)


def measure_timeline(
    plan: ShardingPlan, model: ModelProfile, network: nn.Module, step: Callable[[], object], device: torch.device
) -> StepTimeline:
    """Trace the fastest of several steps on this rank. `step` runs forward and backward; all ranks call it together."""
    if not isinstance(network, FSDPModule):
        raise ConfigError("the network is not sharded; apply a plan to it first.")
    for _ in range(_WARMUP_STEPS):
        step()
    timelines = [_StepTracer(plan, model, network, device).trace(step) for _ in range(_REPEATS)]
    return min(timelines, key=lambda timeline: timeline.seconds)


class _StepTracer:
    """Records the events of one step."""

    def __init__(self, plan: ShardingPlan, model: ModelProfile, network: FSDPModule, device: torch.device) -> None:
        self._device = device
        units = dict(enumerate(find_unit_modules(plan, model, cast(nn.Module, network))))
        self._units: dict[int, list[nn.Module]] = {ROOT: [cast(nn.Module, network)], **units}
        self._last_unit = len(units) - 1
        self._open: list[tuple[str, int]] = []  # compute events that have begun
        self._begins: dict[int, Timestamp] = {}  # by event index
        self._ends: dict[int, Timestamp] = {}
        self._issued: list[tuple[str, int]] = []  # operation and unit of each event

    def trace(self, step: Callable[[], object]) -> StepTimeline:
        handles = []
        for index, modules in self._units.items():
            callback = partial(self._on_event, index)
            unit = cast(FSDPModule, modules[0])
            unit.set_custom_all_gather(_TracedAllGather(callback))
            unit.set_custom_reduce_scatter(_TracedReduceScatter(callback))
            handles += add_hooks(modules, callback)
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._clock = DeviceClock(self._device)
        step()
        self._close()
        for handle in handles:
            handle.remove()
        for modules in self._units.values():
            unit = cast(FSDPModule, modules[0])
            unit.set_custom_all_gather(_TracedAllGather(_ignore))
            unit.set_custom_reduce_scatter(_TracedReduceScatter(_ignore))
        peak = float(torch.cuda.max_memory_allocated(self._device)) if on_gpu else None
        return StepTimeline(tuple(self._events()), peak)

    def _on_event(self, unit: int, op: str, is_begin: bool) -> None:
        if unit == ROOT and op == FORWARD:  # begins where the last unit ends
            if not is_begin:
                self._forward_end = self._clock.now()
            return
        if is_begin:
            self._begin(unit, op)
        else:
            self._end(unit, op)

    def _begin(self, unit: int, op: str) -> None:
        if op in COMPUTE and (op, unit) in self._issued:
            return  # another of its outputs
        self._close()
        self._begins[len(self._issued)] = self._clock.now()
        self._issued.append((op, unit))
        if op in COMPUTE:
            self._open.append((op, unit))

    def _end(self, unit: int, op: str) -> None:
        if (op, unit) in self._open or op not in COMPUTE:
            index = len(self._issued) - 1 - self._issued[::-1].index((op, unit))
            self._ends[index] = self._clock.now()

    def _close(self) -> None:
        """End the open compute events, at the latest when another event begins."""
        for op, unit in self._open:
            index = self._issued.index((op, unit))
            self._ends.setdefault(index, self._clock.now())
        self._open.clear()

    def _events(self) -> Sequence[TimelineEvent]:
        seconds = self._clock.seconds
        events = []
        for index, (op, unit) in enumerate(self._issued):
            events.append(TimelineEvent(op, unit, seconds(self._begins[index]), seconds(self._ends[index])))
            if (op, unit) == (FORWARD, self._last_unit):
                events.append(TimelineEvent(FORWARD, ROOT, events[-1].end, seconds(self._forward_end)))
        zero = min(event.start for event in events)
        return [TimelineEvent(event.op, event.unit, event.start - zero, event.end - zero) for event in events]


def _ignore(op: str, is_begin: bool) -> None:
    """Trace nothing."""


class _TracedAllGather(AllGather):
    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, async_op: bool = False
    ) -> distributed.Work | None:
        self._callback(ALL_GATHER, True)
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        self._callback(ALL_GATHER, False)
        return cast("distributed.Work | None", work)


class _TracedReduceScatter(ReduceScatter):
    def __init__(self, callback: Callback) -> None:
        self._callback = callback

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
        self._callback(REDUCE_SCATTER, True)
        work = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._callback(REDUCE_SCATTER, False)
        return cast("distributed.Work | None", work)
