"""Densities from pipeline slack: stages that finish backward early have time to send more.

With 1F1B the drain is backward only: stage s waits for the backward of the stages before it, so until the optimizer
step it has the slack t_b(0) + ... + t_b(s-1), which is s t_b for equal stages. Stage s uses the largest density d_s
with T(d_s) <= slack_s; the first stage has no slack and uses the minimum density. Communication longer than its slack
delays the step: exposed = max over s of (T(d_s) - slack_s)+.

T of a layer of G elements between n replicas is the alpha-beta model, with 4 bytes per value and per index: dense
gradients take one all-gather of flags and an all-reduce; exclusive sparsifiers (MiCRO, ExDyna, DEFT) all-gathers of
counts and of (n-1)/n d G indices, and an all-reduce of d G values. Every layer pays its own alphas.

"Layer-overlapped gradient sparsification" for pipelines is known by name only (no paper or code was found): the rule
is our design. Optimus-CC (ASPLOS 2023, arXiv 2301.09830) compresses only what is on the critical path of a pipeline;
that it takes the earliest stages first is from memory, not read there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.link import Link

DENSE = 1.0  # the density at which gradients are sent without indices
_WIDTH = 4  # bytes per value and per index
_FLAGS = 8  # bytes: a count, and whether all is finite


def slack_per_stage(backward: Sequence[float]) -> list[float]:
    """Return the seconds that each stage has after its last backward. `backward`: seconds per micro-batch and stage."""
    return [0.0, *accumulate(backward[:-1])]


def dense_time(numel: float, link: Link) -> float:
    """Return the seconds to all-reduce one layer."""
    n = link.world_size
    return link.time("all-gather", (n - 1) * _FLAGS) + link.time("all-reduce", 2 * (n - 1) / n * numel * _WIDTH)


def sparse_time(numel: float, density: float, link: Link) -> float:
    """Return the seconds to send a share of one layer, selected in exclusive ranges."""
    n, selected = link.world_size, density * numel
    indices = link.time("all-gather", (n - 1) / n * selected * _WIDTH)
    return (
        link.time("all-gather", (n - 1) * _FLAGS)
        + indices
        + link.time("all-reduce", 2 * (n - 1) / n * selected * _WIDTH)
    )


def stage_time(layers: Sequence[int], density: float, link: Link) -> float:
    """Return the seconds that a stage communicates, layer by layer. `layers`: elements of each."""
    if density >= DENSE:
        return sum(dense_time(numel, link) for numel in layers)
    return sum(sparse_time(numel, density, link) for numel in layers)


def densities_from_slack(
    layers: Sequence[Sequence[int]], backward: Sequence[float], link: Link, floor: float
) -> list[float]:
    """Return a density per stage.

    `layers`: elements of each layer, per stage; `backward`: seconds per micro-batch and stage; `floor`: the minimum.
    """
    if not 0 < floor <= 1:
        raise ConfigError(f"floor is {floor:g}; it is the minimum density, above 0 and at most 1.")
    if len(layers) != len(backward) or not layers:
        raise ConfigError(
            f"there are layers of {len(layers)} stages and times of {len(backward)}; pass both for every stage."
        )
    slacks = slack_per_stage(backward)
    return [_largest_density(sizes, slack, link, floor) for sizes, slack in zip(layers, slacks, strict=True)]


def exposed_time(slacks: Sequence[float], communication: Sequence[float]) -> float:
    """Return the seconds that the optimizer step waits for gradients after the last backward of all stages."""
    return max(max(seconds - slack, 0.0) for slack, seconds in zip(slacks, communication, strict=True))


def simulate_1f1b(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> list[float]:
    """Simulate the schedule and return when each stage ends its last backward; times per micro-batch and stage."""
    stages = len(forward)
    queues = [_schedule_1f1b(stage, stages, microbatches) for stage in range(stages)]
    end_times: dict[tuple[str, int, int], float] = {}  # by phase, stage, micro-batch
    clocks = [0.0] * stages
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue and (ready := _ready_time(*queue[0], stage, stages, end_times)) is not None:
                phase, microbatch = queue.pop(0)
                clocks[stage] = max(clocks[stage], ready) + (forward if phase == "forward" else backward)[stage]
                end_times[phase, stage, microbatch] = clocks[stage]
    return clocks


def _largest_density(layers: Sequence[int], slack: float, link: Link, floor: float) -> float:
    if stage_time(layers, DENSE, link) <= slack:
        return DENSE
    fixed = sum(sparse_time(numel, 0.0, link) for numel in layers)
    slope = sum(sparse_time(numel, 1.0, link) for numel in layers) - fixed  # T is linear in the density
    return max((slack - fixed) / slope, floor) if slope > 0 else floor


def _schedule_1f1b(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Return what a stage does, in order: forwards until the pipeline is full, then one backward, one forward."""
    warmup = min(microbatches, stages - stage)
    order = [("forward", microbatch) for microbatch in range(warmup)]
    for microbatch in range(microbatches):
        order.append(("backward", microbatch))
        if warmup + microbatch < microbatches:
            order.append(("forward", warmup + microbatch))
    return order


def _ready_time(
    phase: str, microbatch: int, stage: int, stages: int, end_times: dict[tuple[str, int, int], float]
) -> float | None:
    """Return when the input of a phase is available; None: not known yet."""
    if phase == "forward":
        return 0.0 if not stage else end_times.get(("forward", stage - 1, microbatch))
    is_last = stage == stages - 1
    return end_times.get(("forward", stage, microbatch) if is_last else ("backward", stage + 1, microbatch))
