"""MiCRO and ExDyna: ranges tile the vector, density stays on target, and moving blocks reduce padding."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from smelt.train.gradients.comm import Traffic
from smelt.train.gradients.compressor import CompressionStep
from smelt.train.gradients.compressors import DEFT, ExDyna, MiCRO, TopK
from smelt.train.gradients.exclusive import ExclusiveThreshold, even_range
from tests.train.parallel import run
from tests.train.synthetic import build_reducer, make_gradient, make_layout, rank

SHAPES = {"hot": (64, 256), "cold": (128, 256), "warm": (64, 256)}  # 65,536 = 2 * 32 * 1024 elements
UNEVEN = {"hot": (61, 257), "cold": (129, 251), "warm": (63, 254), "bias": (13,)}


def follow(kinds: list[ExclusiveThreshold], shapes: dict[str, tuple[int, ...]], steps: int, after: int) -> Any:
    """Return the traffic from step `after` on, the last result and the ranges of every step."""
    layout = make_layout(shapes)
    gradients = [make_gradient(layout, number, rank()) for number in range(steps)]
    values = []
    for compressor in kinds:
        reducer = build_reducer(compressor, layout=layout)
        traffic, results, ranges = [], [], []
        for number, gradient in enumerate(gradients):
            results.append(reducer.reduce(gradient))
            if number >= after:
                traffic.append(reducer.traffic)
            if isinstance(compressor, ExclusiveThreshold):
                step = CompressionStep(
                    0, gradient, reducer.residual, layout, reducer.comm, reducer.state, reducer.counts
                )
                ranges.append(
                    [compressor.partition_range(partition, step) for partition in range(reducer.comm.world_size)]
                )
        everything = sum(traffic, Traffic())
        values.append((everything.build_up, everything.padding_overhead, torch.stack(results).numpy(), ranges))
    return values


@pytest.mark.parametrize("workers", [2, 4])
def test_exdyna_without_balancing_is_micro_bit_for_bit(workers: int) -> None:
    compressors = [MiCRO(density=0.01, sampled_steps=5), ExDyna(density=0.01, sampled_steps=5, balance=False)]
    for (_, _, micro, micro_ranges), (_, _, exdyna, ranges) in run(workers, follow, compressors, SHAPES, 12, 0):
        assert (micro == exdyna).all()
        assert micro.any()
        assert micro_ranges == ranges


def test_density_is_kept_and_moving_blocks_pad_less() -> None:
    """Check the last 40 of 100 steps; the first 50 are sampled, so here the controller alone sets the density."""
    compressors = [MiCRO(density=0.01, sampled_steps=50), ExDyna(density=0.01, sampled_steps=50, blocks=64)]
    results = run(4, follow, compressors, UNEVEN, 100, 60)
    (micro, micro_padding, _, _), (exdyna, exdyna_padding, _, ranges) = results[0]
    topk = run(4, follow, [TopK(density=0.01)], UNEVEN, 5, 2)[0][0][0]
    assert 0.85 < micro < 1.15
    assert 0.85 < exdyna < 1.15
    assert topk > 2.5
    assert exdyna_padding < 0.75 * micro_padding
    assert ranges[-1] != ranges[0]
    size = make_layout(UNEVEN).numel
    for step in ranges:
        assert step[0][0] == 0
        assert step[-1][1] == size
        assert all(left[1] == right[0] and left[0] < left[1] for left, right in pairwise(step))
    assert all(result[1][3] == ranges for result in results)


def test_sampling_keeps_density_from_the_first_step() -> None:
    (low, _, _, _), (deft, _, _, _) = run(3, follow, [MiCRO(density=0.02), DEFT(density=0.02)], UNEVEN, 3, 0)[0]
    assert 0.85 < low < 1.15
    assert deft == pytest.approx(1.0)


def follow_a_jump(factor: float) -> list[float]:
    """Return the build-up of each step; gradients change scale after the sampled start."""
    reducer, results = build_reducer(MiCRO(density=0.02, sampled_steps=5), layout=make_layout(UNEVEN)), []
    for number in range(40):
        reducer.reduce(make_gradient(reducer.layout, number, rank()) * (1.0 if number < 20 else factor))
        results.append(reducer.traffic.build_up)
    return results


@pytest.mark.parametrize(("factor", "lowest"), [(10.0, 0.85), (0.3, 0.75)])  # small ones drain the residual slowly
def test_density_recovers_when_gradients_change_scale(factor: float, lowest: float) -> None:
    result = run(2, follow_a_jump, factor)[0]
    assert not 0.85 < result[20] < 1.15  # the jump is unpredictable
    assert lowest < sum(result[21:]) / len(result[21:]) < 1.15


def only_one_has_gradients() -> float:
    """Return the residual left after every rank had every range once."""
    reducer = build_reducer(MiCRO(density=0.9, sampled_steps=0))
    reducer.state["threshold"] = torch.tensor(1e-30, dtype=torch.float64)
    for number in range(3):
        mine = make_gradient(reducer.layout, 0, 0) if rank() == 0 and number == 0 else torch.zeros(reducer.layout.numel)
        reducer.reduce(mine)
    return float(reducer.residual.abs().max())


def test_ranges_rotate_over_all_ranks() -> None:
    assert max(run(3, only_one_has_gradients)) == 0


def test_a_vector_too_short_for_blocks_is_split_like_micro() -> None:
    small = {"a": (50, 7)}
    compressors = [MiCRO(density=0.1), ExDyna(density=0.1)]
    for (_, _, micro, _), (_, _, exdyna, _) in run(3, follow, compressors, small, 5, 0):
        assert (micro == exdyna).all()


def test_the_selection_is_never_empty() -> None:
    reducer = build_reducer(MiCRO(density=0.01, sampled_steps=0))
    reducer.reduce(torch.zeros(reducer.layout.numel))
    assert reducer.counts == [1]


def test_equal_ranges_tile() -> None:
    for elements, workers in [(10, 3), (3, 5), (12, 4)]:
        ranges = [even_range(partition, elements, workers) for partition in range(workers)]
        assert [position for start, stop in ranges for position in range(start, stop)] == list(range(elements))


def test_the_threshold_moves_both_ways_inside_the_band() -> None:
    def next_threshold(count: int) -> float:
        reducer = build_reducer(MiCRO(density=0.1, sampled_steps=0))
        reducer.counts = [count]
        before = float(reducer.state["threshold"])
        reducer.reduce(torch.zeros(reducer.layout.numel))
        return float(reducer.state["threshold"]) / before

    target = int(0.1 * make_layout().numel)
    expected = {1.2: 1.005, 1.05: 1.00125, 0.95: 0.9987, 0.5: 0.995}
    for ratio, factor in expected.items():
        assert next_threshold(int(ratio * target)) == pytest.approx(factor)
