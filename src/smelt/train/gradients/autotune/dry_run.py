"""A compressor tried out on a vector: what it sends in a step, collective by collective, and what its own work costs.

It really runs, between the real workers and with a memory that is thrown away afterwards, so that all bytes are those
the frame would count: build-up, padding, counts and all. Time spent inside collectives is not part of its own work.
What writes the whole vector sends as much whatever the others have, and too much to send it for a trial: it talks to
itself, about a part of the vector, and the rest is taken to cost the same. These are its first steps: what a method
needs many of them to settle on (SAGE's threshold, AdaComp's residues) has not settled yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, prod

import torch
from torch import Tensor

from smelt.train.gradients.autotune.link import Link
from smelt.train.gradients.autotune.timed_comm import CollectiveCall, TimedComm, max_over_ranks, synchronized_time
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compression import reducer_kind
from smelt.train.gradients.compressor import Coder, Compressor
from smelt.train.gradients.compressors.powersgd import PowerSGD
from smelt.train.gradients.dense import Dense
from smelt.train.gradients.fake_comm import EchoWorkers
from smelt.train.gradients.hierarchy import part_of
from smelt.train.gradients.layout import Layout, Piece
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import Settings

_STEPS = 2
_FEW = 1024  # elements of a vector that a method is tried on first: what is loaded or built on first use is there then
_PART = 2**20  # elements of a vector that a method is tried on when it treats all alike
_SIDE = 1024  # rows and columns of the matrices of an synthetic_layout model


@dataclass(frozen=True)
class DryRunResult:
    """Of one compressor and one vector; seconds and bytes of the worker that has the most of them."""

    method: str
    elements: int
    bytes: int  # that arrive at a worker in a step
    calls: int  # collectives
    communication: float  # seconds that the line through the link gives for them
    computing: float  # seconds, measured


def method_label(compressor: Compressor) -> str:
    """What a table calls it."""
    if isinstance(compressor, Dense):
        return {"float32": "dense", "bfloat16": "bf16", "float16": "fp16"}.get(compressor.values, compressor.values)
    return compressor.name


def dry_run_compressor(
    compressor: Compressor,
    gradient: Tensor,  # [elements]
    layout: Layout,
    workers: Workers,
    link: Link,
    settings: Settings | None = None,
    enough: float = inf,
) -> DryRunResult:
    """All workers call it together; the result is the same on each.

    `enough`: seconds of another method. What takes more than twice as long in its first step is not looked at again.
    """
    elements, device, together = layout.size, gradient.device, Workers(workers.group)
    timed = TimedComm(workers.group)
    if isinstance(compressor, Dense | Coder):
        timed, layout = EchoWorkers(workers.group), part_of(layout, 0, min(_PART, elements))
        gradient = gradient[: layout.size]
    times = elements / layout.size  # as much as was tried

    def made(layout: Layout) -> Reducer:
        kind = reducer_kind(compressor)
        reducer: Reducer = kind(
            compressor, layout, timed, settings or Settings(), device=device, learning_rate=lambda: 1.0
        )
        if isinstance(compressor, PowerSGD):  # past its first steps, which send everything
            reducer.restore({**reducer.tensors(), "step": torch.tensor(compressor.plain)})
        return reducer

    made(part_of(layout, 0, min(_FEW, layout.size))).mean(gradient[:_FEW])
    reducer = made(layout)
    own = []  # of each step: bytes, calls, seconds of communication as the line has it, seconds of computing
    for place in range(_STEPS):
        together.gather(torch.zeros(1, device=device), "agreement")  # all start together
        timed.calls.clear()
        start = synchronized_time(device)
        reducer.mean(gradient)
        reducer.settle()
        elapsed = synchronized_time(device) - start
        calls = [replace(call, bytes=int(call.bytes * times)) for call in timed.calls]
        own.append(_account(compressor, calls, reducer.traffic.values, elapsed, link))
        if not place and max_over_ranks([own[0][2] + own[0][3] * times], workers, device)[0] > 2 * enough:
            break
    least = min(step[-1] for step in own)
    size, number, communication, computing = max_over_ranks([*own[-1][:-1], least], workers, device)
    return DryRunResult(method_label(compressor), elements, int(size), int(number), communication, computing * times)


def _account(
    compressor: Compressor, calls: Sequence[CollectiveCall], values: int, elapsed: float, link: Link
) -> tuple[float, float, float, float]:
    """Bytes, calls, seconds of communication and of computing.

    PyTorch's PowerSGD makes three all-reduces of its own (plain tensors, P, Q), which nobody can time apart: for them
    the line through the link stands in.
    """
    unseen = [CollectiveCall("all-reduce", values // 3, 0.0)] * 3 if isinstance(compressor, PowerSGD) else []
    inside = sum(call.seconds for call in calls) + sum(link.time(call.collective, call.bytes) for call in unseen)
    made = [*calls, *unseen]
    communication = sum(link.time(call.collective, call.bytes) for call in made)
    return sum(call.bytes for call in made), len(made), communication, max(elapsed - inside, 0.0)


def synthetic_layout(parameters: int) -> Layout:
    """A model of so many parameters: matrices, and a short vector of what is left over."""
    side = min(_SIDE, int(parameters**0.5))
    rows, rest = divmod(parameters, side)
    shapes: list[tuple[int, ...]] = [(side, side)] * (rows // side)
    shapes += [(rows % side, side)] if rows % side else []
    shapes += [(rest,)] if rest else []
    starts = [0, *accumulate(map(prod, shapes))]
    return Layout(tuple(Piece(f"part {number}", shape, starts[number]) for number, shape in enumerate(shapes)))


def synthetic_gradient(layout: Layout, workers: Workers, device: torch.device, seed: int = 0) -> Tensor:
    """[elements]: heavy tails, and a part that all workers share; the exact shape of real gradients is not known."""
    common, own = (torch.Generator(device).manual_seed(1009 * seed + place) for place in (0, workers.rank + 1))
    value = torch.randn(layout.size, generator=own, device=device)
    value.add_(torch.randn(layout.size, generator=common, device=device), alpha=0.3)
    return value.mul_(torch.empty(layout.size, device=device).exponential_(generator=own).sqrt_())
