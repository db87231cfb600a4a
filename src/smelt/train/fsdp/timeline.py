"""The timeline of one step under a sharding plan: compute on one lane, collectives on the other, as FSDP2 issues them.

Forward of a unit: all-gather it unless it is gathered, wait, start to gather the next ones, compute, free it if the
plan reshards it. Backward: the same from the last unit to the first; then its gradients are reduce-scattered. The next
all-gather is issued before the reduce-scatter of the unit that computes. Collectives run in sequence, as on one
communicator; a reduce-scatter waits for the previous one, and compute waits with it (one input buffer). This is the
order of PyTorch 2.13; the root's parameters are gathered first and reduce-scattered last.

Two simplifications. An all-gather that is not prefetched begins when compute reaches its unit, while on a GPU the host
runs ahead of the device and may issue it sooner. Copies in and out of the collectives' buffers take no time, but their
memory is counted: gathered parameters also occupy a buffer until the next unit of forward has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smelt.train.fsdp.plan import ClusterSpec, ModelProfile, ShardingPlan

ROOT = -1  # the unit index of the root
ALL_GATHER, FORWARD, BACKWARD, REDUCE_SCATTER = "all-gather", "forward", "backward", "reduce-scatter"
COMPUTE = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class TimelineEvent:
    op: str
    unit: int
    start: float  # seconds from the start of the step
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class StepTimeline:
    """One step on one rank, predicted or measured."""

    events: tuple[TimelineEvent, ...]  # in the order they were issued
    peak_memory: float | None  # bytes; None: not measured

    @property
    def seconds(self) -> float:
        return max(event.end for event in self.events)

    @property
    def compute_seconds(self) -> float:
        return sum(event.seconds for event in self.events if event.op in COMPUTE)

    @property
    def exposed_seconds(self) -> float:
        """Seconds without compute: communication that nothing overlaps."""
        return self.seconds - self.compute_seconds

    @property
    def order(self) -> list[tuple[str, int]]:
        return [(event.op, event.unit) for event in self.events]

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds,
            "peak_memory": self.peak_memory,
            "events": [[event.op, event.unit, event.start, event.end] for event in self.events],
        }


def predict_timeline(model: ModelProfile, plan: ShardingPlan, cluster: ClusterSpec) -> StepTimeline:
    """Simulate a step with the alpha-beta model of collectives."""
    return _StepSimulator(model, plan, cluster).run()


class _StepSimulator:
    """Simulates one step event by event."""

    def __init__(self, model: ModelProfile, plan: ShardingPlan, cluster: ClusterSpec) -> None:
        self._plan, self._cluster = plan, cluster
        layers = {index: unit.layers(model) for index, unit in enumerate(plan.units)}
        layers[ROOT] = (model.root,)
        self._bytes = {unit: sum(layer.bytes for layer in members) for unit, members in layers.items()}
        self._forward = {unit: sum(layer.forward for layer in members) for unit, members in layers.items()}
        self._backward = {unit: sum(layer.backward for layer in members) for unit, members in layers.items()}
        self._activations = {unit: sum(layer.activations for layer in members) for unit, members in layers.items()}
        self._sharded_bytes = cluster.state_factor * model.bytes / cluster.world_size
        self._compute_end = self._collective_end = self._reduce_scatter_end = 0.0
        self._gather_start: dict[int, float] = {}
        self._gather_end: dict[int, float] = {}  # of units that are gathered or being gathered
        self._copied_at: dict[int, float] = {}  # when parameters were copied out of the all-gather buffer
        self._buffered_unit: int | None = None  # the last unit of forward, whose buffer is still allocated
        self._allocations: list[tuple[float, float, float]] = []  # from, until, bytes
        self._activations_since: dict[int, float] = {}
        self._gradients_since: dict[int, float] = {}
        self._events: list[TimelineEvent] = []

    def run(self) -> StepTimeline:
        order = [*([ROOT] if self._bytes[ROOT] else []), *range(len(self._plan.units))]
        for index, unit in enumerate(order):
            self._unshard(unit, order[index + 1 : index + 1 + self._plan.forward_prefetch], forward=True)
            if unit != ROOT:
                self._compute(FORWARD, unit)
                if self._plan.units[unit].reshard_after_forward:
                    self._reshard(unit)
        self._free_buffer()
        self._compute(FORWARD, ROOT)
        order = [*order[:1], *reversed(order[1:])] if order[0] == ROOT else order[::-1]
        if ROOT not in order:
            self._compute(BACKWARD, ROOT)
        for index, unit in enumerate(order):
            self._unshard(unit, order[index + 1 : index + 1 + self._plan.backward_prefetch], forward=False)
            self._gradients_since[unit] = self._compute_end
            self._compute(BACKWARD, unit)
            if unit != ROOT:
                self._reshard(unit)
                self._reduce_scatter(unit)
        if ROOT in order:
            self._reshard(ROOT)
            self._reduce_scatter(ROOT)
        return StepTimeline(tuple(self._events), self._sharded_bytes + _peak(self._allocations))

    def _unshard(self, unit: int, prefetch: Sequence[int], forward: bool) -> None:
        """Wait until a unit's parameters are gathered, and issue the all-gathers of the units to prefetch."""
        if unit not in self._gather_end:
            self._all_gather(unit)
        self._compute_end = max(self._compute_end, self._gather_end[unit])
        if unit not in self._copied_at:
            self._copied_at[unit] = self._compute_end
            if forward:
                self._free_buffer()
                self._buffered_unit = unit
            else:
                self._allocate(self._gather_start[unit], self._compute_end, self._bytes[unit])
        for other in prefetch:
            if other not in self._gather_end:
                self._all_gather(other)

    def _all_gather(self, unit: int) -> None:
        seconds = self._cluster.all_gather_time(self._bytes[unit])
        self._gather_start[unit], self._gather_end[unit] = self._communicate(ALL_GATHER, unit, seconds)

    def _reduce_scatter(self, unit: int) -> None:
        self._compute_end = max(self._compute_end, self._reduce_scatter_end)
        seconds = self._cluster.reduce_scatter_time(self._bytes[unit])
        _, self._reduce_scatter_end = self._communicate(REDUCE_SCATTER, unit, seconds)
        self._allocate(self._gradients_since.pop(unit), self._reduce_scatter_end, self._bytes[unit])

    def _communicate(self, op: str, unit: int, seconds: float) -> tuple[float, float]:
        start = max(self._compute_end, self._collective_end)
        self._collective_end = start + seconds
        if not self._cluster.overlap:
            self._compute_end = self._collective_end
        self._events.append(TimelineEvent(op, unit, start, self._collective_end))
        return start, self._collective_end

    def _compute(self, op: str, unit: int) -> None:
        seconds = self._forward[unit] if op == FORWARD else self._backward[unit]
        if unit == ROOT and not seconds:
            return
        start, self._compute_end = self._compute_end, self._compute_end + seconds
        self._events.append(TimelineEvent(op, unit, start, self._compute_end))
        if op == FORWARD:
            self._activations_since[unit] = start
        else:
            self._allocate(self._activations_since.pop(unit, start), self._compute_end, self._activations[unit])

    def _reshard(self, unit: int) -> None:
        self._allocate(self._copied_at.pop(unit), self._compute_end, self._bytes[unit])
        del self._gather_end[unit]

    def _free_buffer(self) -> None:
        if self._buffered_unit is not None:
            unit, self._buffered_unit = self._buffered_unit, None
            self._allocate(self._gather_start[unit], self._compute_end, self._bytes[unit])

    def _allocate(self, since: float, until: float, size: float) -> None:
        self._allocations.append((since, until, size))


def _peak(allocations: list[tuple[float, float, float]]) -> float:
    """Return the most bytes allocated at any time; memory freed at a moment is available at that moment."""
    changes = [(since, 1, size) for since, _, size in allocations]
    changes += [(until, 0, -size) for _, until, size in allocations]
    current = peak = 0.0
    for _, _, change in sorted(changes):
        current += change
        peak = max(peak, current)
    return peak
