"""Dry-run a compressor on a bucket: what it sends per step, collective by collective, and what its own compute costs.

It really runs, between the real ranks and with a residual that is discarded, so that bytes are those of training:
build-up, padding, counts and all. Time inside collectives is not part of its compute. Methods that send the whole
bucket send as many bytes whatever the other ranks have, too many for a trial: they run against `fake_comm.py` on a part
of the bucket, and the rest is assumed to cost the same. These are a method's first steps: what takes many steps to
converge (SAGE's threshold, AdaComp's residuals) has not converged yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, prod

import torch
from torch import Tensor

from smelt.train.gradients.autotune.link import Link
from smelt.train.gradients.autotune.timed_comm import CollectiveCall, FakeComm, TimedComm, max_over_ranks
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compression import reducer_class
from smelt.train.gradients.compressor import Compressor, GradientEncoder
from smelt.train.gradients.compressors.powersgd import PowerSGD
from smelt.train.gradients.dense import Dense
from smelt.train.gradients.layout import BucketLayout, ParamSlice
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import CompressionSettings
from smelt.train.timing import synchronized_time

_STEPS = 2
_WARMUP_ELEMENTS = 1024  # for a first call, which loads or compiles what is needed
_SAMPLE_ELEMENTS = 2**20  # for methods that treat all elements alike
_MATRIX_SIDE = 1024  # of a synthetic model


@dataclass(frozen=True)
class DryRunResult:
    """One compressor on one bucket, per step; each number is the largest of all ranks."""

    method: str
    elements: int
    bytes: int  # that arrive at a rank
    calls: int  # collectives
    communication: float  # seconds that the measured link predicts for them
    compute: float  # seconds, measured


def method_label(compressor: Compressor) -> str:
    """Return a compressor's name in tables."""
    if isinstance(compressor, Dense):
        return {"float32": "dense", "bfloat16": "bf16", "float16": "fp16"}.get(
            compressor.wire_dtype, compressor.wire_dtype
        )
    return compressor.name


def dry_run_compressor(
    compressor: Compressor,
    gradient: Tensor,  # [elements]
    layout: BucketLayout,
    comm: Comm,
    link: Link,
    settings: CompressionSettings | None = None,
    best_seconds: float = inf,
) -> DryRunResult:
    """Try a compressor; all ranks call it together and get the same result.

    A method that takes more than twice `best_seconds` in its first step gets no second one.
    """
    elements, device, barrier = layout.numel, gradient.device, Comm(comm.group)
    timed = TimedComm(comm.group)
    if isinstance(compressor, Dense | GradientEncoder):
        timed, layout = FakeComm(comm.group), layout.cut(0, min(_SAMPLE_ELEMENTS, elements))
        gradient = gradient[: layout.numel]
    scale = elements / layout.numel

    def build_reducer(layout: BucketLayout) -> Reducer:
        cls = reducer_class(compressor)
        reducer: Reducer = cls(
            compressor, layout, timed, settings or CompressionSettings(), device=device, learning_rate=lambda: 1.0
        )
        if isinstance(compressor, PowerSGD):  # skip its first steps, which send everything
            reducer.restore({**reducer.tensors(), "step": torch.tensor(compressor.warmup_steps)})
        return reducer

    warmup_layout = layout.cut(0, min(_WARMUP_ELEMENTS, layout.numel))
    build_reducer(warmup_layout).mean(gradient[:_WARMUP_ELEMENTS])
    reducer = build_reducer(layout)
    steps = []  # bytes, calls, predicted seconds of communication, seconds of compute
    for index in range(_STEPS):
        barrier.all_gather(torch.zeros(1, device=device), "agreement")  # start together
        timed.calls.clear()
        start = synchronized_time(device)
        reducer.mean(gradient)
        reducer.resolve_deferred()
        elapsed = synchronized_time(device) - start
        calls = [replace(call, bytes=int(call.bytes * scale)) for call in timed.calls]
        steps.append(_step_costs(compressor, calls, reducer.traffic.values, elapsed, link))
        if not index and max_over_ranks([steps[0][2] + steps[0][3] * scale], comm, device)[0] > 2 * best_seconds:
            break
    least_compute = min(step[-1] for step in steps)
    size, count, communication, compute = max_over_ranks([*steps[-1][:-1], least_compute], comm, device)
    return DryRunResult(method_label(compressor), elements, int(size), int(count), communication, compute * scale)


def _step_costs(
    compressor: Compressor, calls: Sequence[CollectiveCall], value_bytes: int, elapsed: float, link: Link
) -> tuple[float, float, float, float]:
    """Return bytes, calls, predicted seconds of communication and measured seconds of compute.

    PyTorch's PowerSGD hook makes three all-reduces of its own (uncompressed tensors, P, Q) that cannot be timed
    separately: for them the link's prediction is used.
    """
    untimed = [CollectiveCall("all-reduce", value_bytes // 3, 0.0)] * 3 if isinstance(compressor, PowerSGD) else []
    in_collectives = sum(call.seconds for call in calls)
    in_collectives += sum(link.time(call.collective, call.bytes) for call in untimed)
    all_calls = [*calls, *untimed]
    communication = sum(link.time(call.collective, call.bytes) for call in all_calls)
    return sum(call.bytes for call in all_calls), len(all_calls), communication, max(elapsed - in_collectives, 0.0)


def synthetic_layout(parameters: int) -> BucketLayout:
    """Lay out a model with this many parameters: square matrices, and a short vector for the remainder."""
    side = min(_MATRIX_SIDE, int(parameters**0.5))
    rows, rest = divmod(parameters, side)
    shapes: list[tuple[int, ...]] = [(side, side)] * (rows // side)
    shapes += [(rows % side, side)] if rows % side else []
    shapes += [(rest,)] if rest else []
    starts = [0, *accumulate(map(prod, shapes))]
    return BucketLayout(tuple(ParamSlice(f"part {index}", shape, starts[index]) for index, shape in enumerate(shapes)))


def synthetic_gradient(layout: BucketLayout, comm: Comm, device: torch.device, seed: int = 0) -> Tensor:
    """Draw a gradient, [elements]: heavy tails and a component that all ranks share; real ones may differ."""
    common, local = (torch.Generator(device).manual_seed(1009 * seed + stream) for stream in (0, comm.rank + 1))
    value = torch.randn(layout.numel, generator=local, device=device)
    value.add_(torch.randn(layout.numel, generator=common, device=device), alpha=0.3)
    return value.mul_(torch.empty(layout.numel, device=device).exponential_(generator=local).sqrt_())
