"""Densities from pipeline slack: a simulated 1F1B drain, and the rule of the method card."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.link import CollectiveFit, Link
from smelt.train.gradients.autotune.timed_comm import COLLECTIVES
from smelt.train.gradients.pipeline.slack import (
    dense_time,
    densities_from_slack,
    exposed_time,
    simulate_1f1b,
    slack_per_stage,
    sparse_time,
    stage_time,
)


def make_link(alpha: float, bandwidth: float, workers: int = 8) -> Link:
    return Link(workers, "none", dict.fromkeys(COLLECTIVES, CollectiveFit(alpha, 1 / bandwidth, 0.0, (), ())))


@given(st.integers(1, 6), st.integers(1, 9), st.floats(0.1, 3.0))
def test_stage_s_ends_s_backwards_before_the_first(stages: int, microbatches: int, ratio: float) -> None:
    """Check slack = s t_b against the full schedule."""
    ends = simulate_1f1b([1.0] * stages, [ratio] * stages, microbatches)
    slacks = [max(ends) - end for end in ends]
    assert slacks == pytest.approx([stage * ratio for stage in range(stages)])
    assert slacks == pytest.approx(slack_per_stage([ratio] * stages))
    assert ends[0] == pytest.approx((1 + ratio) * (microbatches + stages - 1))  # the known length of 1F1B


def test_unequal_stages_have_the_time_of_the_stages_before_them() -> None:
    forward, backward = [1.0, 2.0, 1.5], [2.0, 4.0, 3.0]
    ends = simulate_1f1b(forward, backward, 5)
    assert [ends[0] - end for end in ends] == pytest.approx(slack_per_stage(backward)) == [0.0, 2.0, 6.0]


def test_communication_longer_than_its_slack_delays_the_step() -> None:
    """Simulate: every stage sends after its last backward, and the step ends when all have sent."""
    backward, sent = [0.2] * 4, [0.3, 0.1, 0.9, 0.5]
    ends = simulate_1f1b([0.1] * 4, backward, 6)
    step = max(end + duration for end, duration in zip(ends, sent, strict=True))
    assert exposed_time(slack_per_stage(backward), sent) == pytest.approx(step - max(ends)) == pytest.approx(0.5)


def test_times_match_the_cost_model() -> None:
    link = make_link(
        0.0, 12.5e9
    )  # the card: 25.6 M elements, 8 workers, 100 Gb/s, exclusive at 0.001: 0.13 ms with alphas
    assert dense_time(25.6e6, link) == pytest.approx(0.01434, rel=0.01)
    one = 0.001 * 25.6e6
    assert sparse_time(25.6e6, 0.001, link) == pytest.approx((7 / 8 * one * 4 + 2 * 7 / 8 * one * 4) / 12.5e9, rel=0.01)
    alphas = make_link(1.0, 1e30)
    assert stage_time([10, 10, 10], 0.5, alphas) == pytest.approx(9) and stage_time([10], 1.0, alphas) == pytest.approx(
        2
    )


def test_only_the_first_stage_is_exposed_and_density_grows() -> None:
    layers, backward, link = [[1_000_000] * 4] * 6, [0.005] * 6, make_link(1e-5, 1.25e9)
    result = densities_from_slack(layers, backward, link, floor=0.001)
    sent = [stage_time(sizes, density, link) for sizes, density in zip(layers, result, strict=True)]
    assert result[0] == 0.001 and result[-1] == 1.0
    assert result == sorted(result) and 0.001 < result[1] < result[2] < 1
    assert exposed_time(slack_per_stage(backward), sent) == pytest.approx(sent[0])
    for density, slack, sizes in zip(result[1:], slack_per_stage(backward)[1:], layers[1:], strict=True):
        assert stage_time(sizes, density, link) <= slack * (1 + 1e-9)
        if density < 1:  # the largest that fits
            assert stage_time(sizes, density * 1.01, link) > slack


def test_a_slow_link_leaves_every_stage_at_the_floor() -> None:
    assert densities_from_slack([[1000]] * 3, [1e-6] * 3, make_link(0.01, 1e6), 0.01) == [0.01] * 3


@pytest.mark.parametrize(("floor", "backward", "words"), [(0.0, [1.0], "floor is 0"), (0.1, [1.0, 2.0], "1 stages")])
def test_invalid_arguments_raise_one_sentence(floor: float, backward: list[float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        densities_from_slack([[10]], backward, make_link(0, 1), floor)
