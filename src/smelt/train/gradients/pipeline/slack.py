"""Pipeline stages end their backward one after the other; whoever ends early has time to send more.

With 1F1B the drain is backward only: stage s waits for the backward of the stages before it, so until the optimiser's
step it has the slack t_b(0) + ... + t_b(s-1), which is s t_b for equal stages. Stage s sends with the largest density
d_s at which T(d_s) <= slack_s; the first stage has none and sends with the floor. What is longer than its slack holds
the step up: exposed = max over s of (T(d_s) - slack_s)+.

T of a layer of G elements between n replicas is the alpha-beta model, with 4 bytes for a value and for an index: whole
vectors one gather of marks and an all-reduce; exclusive sparsifiers (MiCRO, ExDyna, DEFT) gathers of counts and of
(n-1)/n d G indices, and an all-reduce of d G values. Layer by layer every layer pays its own alphas.

"Layer-overlapped gradient sparsification" for pipelines is known by name only (no paper or code was found): the rule
is our design. Optimus-CC (ASPLOS 2023, arXiv 2301.09830) compresses only what is on the critical path of a pipeline;
that it takes the earliest stages first is from memory, not read there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.link import Link

WHOLE = 1.0  # the density at which vectors are sent as they are, without indices
_WIDTH = 4  # bytes of a value and of an index
_MARKS = 8  # bytes: a count, and whether all is finite


def slack_of(backward: Sequence[float]) -> list[float]:
    """Seconds that each stage has after its last backward. `backward`: of one micro-batch in each stage."""
    return [0.0, *accumulate(backward[:-1])]


def whole_time(elements: float, link: Link) -> float:
    """Seconds to send all gradients of one layer."""
    n = link.world_size
    return link.time("all-gather", (n - 1) * _MARKS) + link.time("all-reduce", 2 * (n - 1) / n * elements * _WIDTH)


def sparse_time(elements: float, density: float, link: Link) -> float:
    """Seconds to send a share of them, chosen by replicas that look in different places."""
    n, chosen = link.world_size, density * elements
    indices = link.time("all-gather", (n - 1) / n * chosen * _WIDTH)
    return (
        link.time("all-gather", (n - 1) * _MARKS) + indices + link.time("all-reduce", 2 * (n - 1) / n * chosen * _WIDTH)
    )


def stage_time(layers: Sequence[int], density: float, link: Link) -> float:
    """Seconds that a stage sends for, layer after layer. `layers`: elements of each."""
    if density >= WHOLE:
        return sum(whole_time(each, link) for each in layers)
    return sum(sparse_time(each, density, link) for each in layers)


def densities_from_slack(
    layers: Sequence[Sequence[int]], backward: Sequence[float], link: Link, floor: float
) -> list[float]:
    """A density for each stage. `layers`: of each stage the elements of its layers; `floor`: the least that is sent."""
    if not 0 < floor <= 1:
        raise ConfigError(
            f"floor is {floor:g}; it is the least share of gradients that is sent, above 0 and at most 1."
        )
    if len(layers) != len(backward) or not layers:
        raise ConfigError(
            f"there are {len(layers)} stages with layers and {len(backward)} with times; give both of each."
        )
    slacks = slack_of(backward)
    return [_largest(sizes, slack, link, floor) for sizes, slack in zip(layers, slacks, strict=True)]


def exposed(slacks: Sequence[float], communication: Sequence[float]) -> float:
    """Seconds that the optimiser's step waits for gradients after the last backward of all stages."""
    return max(max(sent - slack, 0.0) for slack, sent in zip(slacks, communication, strict=True))


def ends_of_1f1b(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> list[float]:
    """When each stage ends its last backward: the whole schedule played through, one time a stage and micro-batch."""
    stages = len(forward)
    orders = [_order(stage, stages, microbatches) for stage in range(stages)]
    done: dict[tuple[str, int, int], float] = {}  # kind, stage, micro-batch -> when it ended
    clocks = [0.0] * stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order and (ready := _ready(*order[0], stage, stages, done)) is not None:
                kind, number = order.pop(0)
                clocks[stage] = max(clocks[stage], ready) + (forward if kind == "forward" else backward)[stage]
                done[kind, stage, number] = clocks[stage]
    return clocks


def _largest(layers: Sequence[int], slack: float, link: Link, floor: float) -> float:
    if stage_time(layers, WHOLE, link) <= slack:
        return WHOLE
    fixed = sum(sparse_time(each, 0.0, link) for each in layers)
    slope = sum(sparse_time(each, 1.0, link) for each in layers) - fixed  # T is a line in the density
    return max((slack - fixed) / slope, floor) if slope > 0 else floor


def _order(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """What a stage does, in order: forwards until the pipeline is full, then one backward, one forward."""
    ahead = min(microbatches, stages - stage)
    order = [("forward", number) for number in range(ahead)]
    for number in range(microbatches):
        order.append(("backward", number))
        if ahead + number < microbatches:
            order.append(("forward", ahead + number))
    return order


def _ready(kind: str, number: int, stage: int, stages: int, done: dict[tuple[str, int, int], float]) -> float | None:
    """When what a micro-batch needs from its neighbour is there; None: it is not known yet."""
    if kind == "forward":
        return 0.0 if not stage else done.get(("forward", stage - 1, number))
    last = stage == stages - 1
    return done.get(("forward", stage, number) if last else ("backward", stage + 1, number))
