"""A method is chosen where the step time gains, not only the communication time."""

from __future__ import annotations

import pytest

from smelt.train.gradients.autotune.cost_model import MIN_SPEEDUP, CostPrediction, choose_methods


def waits(*seconds: float) -> list[CostPrediction]:
    return [CostPrediction("any", 0, 1, communication, 0.0, 0.0) for communication in seconds]


@pytest.mark.parametrize(
    ("rest", "methods", "dense", "found"),
    [
        (0.0, [10.0, 4.0, 6.0], 10.0, (1,)),
        (0.0, [10.0, 12.0], 10.0, (0,)),  # no gain
        (0.0, [10.0, 9.0], 10.0, (0,)),  # too small a gain
        (100.0, [10.0, 1.0], 10.0, (0,)),  # ten times shorter, but hidden by backward
        (1.0, [10.0, 1.0], 10.0, (1,)),
        (0.0, [10.0, 4.0], 4.4, (0,)),  # DDP hides most of what it sends
    ],
)
def test_a_method_must_shorten_the_step(
    rest: float, methods: list[float], dense: float, found: tuple[int, ...]
) -> None:
    assert choose_methods([waits(*methods)], waits(dense)[0], rest) == found


def test_all_buckets_together_must_gain() -> None:
    vectors = [waits(10.0, 2.0), waits(5.0, 6.0)]
    assert choose_methods(vectors, waits(15.0)[0]) == (1, 0)
    assert choose_methods(vectors, waits(7.0 * MIN_SPEEDUP * 0.99)[0]) == (0, 0)
