"""The timeline of one step under a plan: computing on one lane, collectives on the other, as FSDP2 issues them.

Forward of a unit: gather it unless it is there, wait, begin to gather the next ones, compute, give it back if the plan
says so. Backward: the same from the last unit to the first; then its gradients are scattered. The next gather is issued
before the scatter of the unit that is computed. Collectives go one after the other, as on one communicator; a scatter
waits until the one before it has ended, and computing with it (one input buffer). This is the order in the code of
PyTorch 2.13; the root's parameters are gathered first and scattered last.

Two things are simpler here than there. A gather that is not ahead begins when computing reaches its unit, while on a
GPU the host runs in front of the device and may issue it sooner. Copies in and out of the collectives' buffers take no
time, but their memory is counted: what was gathered lies in a buffer too until the next unit of forward has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smelt.train.fsdp.facts import ClusterSpec, ModelProfile
from smelt.train.fsdp.plan import ShardingPlan

REST = -1  # the root, among the numbers of units
GATHER, FORWARD, BACKWARD, SCATTER = "gather", "forward", "backward", "scatter"
COMPUTING = (FORWARD, BACKWARD)


@dataclass(frozen=True)
class TimelineEvent:
    kind: str
    unit: int
    start: float  # seconds from the step's beginning
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """Of one step on one worker, predicted or measured."""

    events: tuple[TimelineEvent, ...]  # as they were issued
    peak: float | None  # bytes; None: not measured

    @property
    def seconds(self) -> float:
        return max(event.end for event in self.events)

    @property
    def computing(self) -> float:
        return sum(event.seconds for event in self.events if event.kind in COMPUTING)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return self.seconds - self.computing

    @property
    def order(self) -> list[tuple[str, int]]:
        return [(event.kind, event.unit) for event in self.events]

    def to_json(self) -> dict[str, Any]:
        events = [[event.kind, event.unit, event.start, event.end] for event in self.events]
        return {"seconds": self.seconds, "exposed": self.exposed, "peak": self.peak, "events": events}


def predict_timeline(model: ModelProfile, plan: ShardingPlan, machines: ClusterSpec) -> Timeline:
    """How a step goes by the alpha-beta model."""
    return _Play(model, plan, machines).step()


class _Play:
    """A step as it is played through."""

    def __init__(self, model: ModelProfile, plan: ShardingPlan, machines: ClusterSpec) -> None:
        self._plan, self._machines, self._rest = plan, machines, model.rest
        parts = {number: unit.of(model) for number, unit in enumerate(plan.units)}
        parts[REST] = (model.rest,)
        self._bytes = {number: sum(each.bytes for each in layers) for number, layers in parts.items()}
        self._forward = {number: sum(each.forward for each in layers) for number, layers in parts.items()}
        self._backward = {number: sum(each.backward for each in layers) for number, layers in parts.items()}
        self._kept = {number: sum(each.activations for each in layers) for number, layers in parts.items()}
        self._resident = machines.kept * model.bytes / machines.workers
        self._computed = self._sent = self._scattered = 0.0  # when computing, collectives, the last scatter are done
        self._begun: dict[int, float] = {}  # gathers: their beginning
        self._arrived: dict[int, float] = {}  # their end, of what is whole or on its way
        self._whole: dict[int, float] = {}  # when parameters were copied out of their buffer
        self._buffer: int | None = None  # of the last unit of forward, still held
        self._used: list[tuple[float, float, float]] = []  # memory: from, until, bytes
        self._activations: dict[int, float] = {}  # kept since
        self._gradients: dict[int, float] = {}  # there since
        self._events: list[TimelineEvent] = []

    def step(self) -> Timeline:
        chain = [*([REST] if self._bytes[REST] else []), *range(len(self._plan.units))]
        for place, unit in enumerate(chain):
            self._make_whole(unit, chain[place + 1 : place + 1 + self._plan.forward_prefetch], forward=True)
            if unit != REST:
                self._compute(FORWARD, unit)
                if self._plan.units[unit].reshard_after_forward:
                    self._give_back(unit)
        self._release_buffer()
        self._compute(FORWARD, REST)
        chain = [*chain[:1], *reversed(chain[1:])] if chain[0] == REST else chain[::-1]
        if REST not in chain:
            self._compute(BACKWARD, REST)
        for place, unit in enumerate(chain):
            self._make_whole(unit, chain[place + 1 : place + 1 + self._plan.backward_prefetch], forward=False)
            self._gradients[unit] = self._computed
            self._compute(BACKWARD, unit)
            if unit != REST:
                self._give_back(unit)
                self._scatter(unit)
        if REST in chain:
            self._give_back(REST)
            self._scatter(REST)
        return Timeline(tuple(self._events), self._resident + _peak(self._used))

    def _make_whole(self, unit: int, ahead: Sequence[int], forward: bool) -> None:
        """Parameters of a unit are there when it returns, and those of the units ahead are on their way."""
        if unit not in self._arrived:
            self._gather(unit)
        self._computed = max(self._computed, self._arrived[unit])
        if unit not in self._whole:
            self._whole[unit] = self._computed
            if forward:
                self._release_buffer()
                self._buffer = unit
            else:
                self._use(self._begun[unit], self._computed, self._bytes[unit])
        for other in ahead:
            if other not in self._arrived:
                self._gather(other)

    def _gather(self, unit: int) -> None:
        self._begun[unit], self._arrived[unit] = self._send(GATHER, unit, self._machines.gathering(self._bytes[unit]))

    def _scatter(self, unit: int) -> None:
        self._computed = max(self._computed, self._scattered)
        _, self._scattered = self._send(SCATTER, unit, self._machines.scattering(self._bytes[unit]))
        self._use(self._gradients.pop(unit), self._scattered, self._bytes[unit])

    def _send(self, kind: str, unit: int, seconds: float) -> tuple[float, float]:
        start = max(self._computed, self._sent)
        self._sent = start + seconds
        if not self._machines.beside:
            self._computed = self._sent
        self._events.append(TimelineEvent(kind, unit, start, self._sent))
        return start, self._sent

    def _compute(self, kind: str, unit: int) -> None:
        seconds = self._forward[unit] if kind == FORWARD else self._backward[unit]
        if unit == REST and not seconds:
            return
        start, self._computed = self._computed, self._computed + seconds
        self._events.append(TimelineEvent(kind, unit, start, self._computed))
        if kind == FORWARD:
            self._activations[unit] = start
        else:
            self._use(self._activations.pop(unit, start), self._computed, self._kept[unit])

    def _give_back(self, unit: int) -> None:
        self._use(self._whole.pop(unit), self._computed, self._bytes[unit])
        del self._arrived[unit]

    def _release_buffer(self) -> None:
        if self._buffer is not None:
            self._use(self._begun[self._buffer], self._computed, self._bytes[self._buffer])
            self._buffer = None

    def _use(self, since: float, until: float, size: float) -> None:
        self._used.append((since, until, size))


def _peak(used: list[tuple[float, float, float]]) -> float:
    """The most bytes at any time; what is given back at a moment is free for what is taken at that moment."""
    changes = [(since, 1, size) for since, _, size in used] + [(until, 0, -size) for _, until, size in used]
    now = most = 0.0
    for _, _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
