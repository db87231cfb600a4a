"""Quality against the bit error rate: no flips change nothing, more flips hurt more, floats more than integers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from torch import nn

from smelt.measure.eval_result import EvalResult
from smelt.measure.robustness.storage import select, stored_tensors
from smelt.measure.robustness.sweep import (
    FaultPoint,
    bit_error_sweep,
    fault_point,
    finite_items,
    mean_difference,
    score,
    tolerated_ber,
)
from smelt.measure.task import evaluate_task
from smelt.models.quantized import QuantizedLinear
from tests.measure.robustness.small_model import classifier, rows


def sweep(number_format: str | None, bers: list[float], seeds: int = 3) -> list[FaultPoint]:
    """Flip bits in the codes, or in the same matrices of the float model."""
    model, data = classifier(number_format), rows()
    matrices = [path for path, layer in model.network.named_modules() if isinstance(layer, nn.Linear | QuantizedLinear)]
    tensors = select(stored_tensors(model.network), layers=matrices)
    tensors = [entry for entry in tensors if entry.attribute in ("codes", "weight")]
    return bit_error_sweep(tensors, lambda: evaluate_task(model, data), bers=bers, seeds=seeds)


def test_no_flips_change_nothing() -> None:
    (point,) = sweep("int8", [0.0])
    clean = evaluate_task(classifier("int8"), rows())
    assert point.flips == (0, 0, 0) and point.changed == (0.0, 0.0, 0.0)
    assert point.mean == clean.value and point.changed_given_a_flip is None


def test_accuracy_falls_with_the_rate_and_integers_survive_longer() -> None:
    low, middle, high = sweep("int8", [1e-4, 1e-2, 0.5])
    assert low.mean >= middle.mean > high.mean
    assert 0 < np.mean(low.flips) < np.mean(middle.flips) < np.mean(high.flips)
    (floats,) = sweep(None, [1e-2])
    assert floats.mean < middle.mean
    assert min(floats.nonfinite) > 0 and max(middle.nonfinite) == 0


def test_seeds_and_rates_give_different_flips_that_repeat() -> None:
    first, second = sweep("int4", [3e-3, 4e-3], seeds=3), sweep("int4", [3e-3, 4e-3], seeds=3)
    assert [point.flips for point in first] == [point.flips for point in second]
    assert len(set(first[0].flips)) > 1


def result(logits: list[list[float]], labels: list[int]) -> EvalResult:
    scores, truth = np.array(logits), np.array(labels)
    predictions = scores.argmax(1)
    items = (predictions == truth).astype(float)
    return EvalResult(
        "accuracy", float(items.mean()), True, "d", items, predictions=predictions, labels=truth, logits=scores
    )


def test_an_item_without_a_finite_output_is_wrong() -> None:
    nan = float("nan")
    clean, faulty = result([[1, 0], [0, 1]], [0, 1]), result([[nan, 0], [0, 1]], [0, 1])
    assert faulty.value == 1.0  # the index of NaN happens to be the label
    assert score(faulty)[0] == 0.5 and finite_items(faulty).tolist() == [False, True]
    point = fault_point([faulty], clean, target="t", ber=0.1, clipped=False, bits=10, flips=[2])
    assert point.values == (0.5,) and point.changed == (0.5,) and point.nonfinite == (0.5,)


def test_perplexity_that_is_not_finite_becomes_null() -> None:
    broken = EvalResult("perplexity", float("nan"), False, "d", np.array([1.0, np.nan]), weights=np.ones(2))
    point = fault_point([broken], broken, target="t", ber=0.1, clipped=False, bits=10, flips=[1])
    plain = json.loads(json.dumps(point.to_json(), allow_nan=False))
    assert plain["values"] == [None] and plain["mean"] is None and plain["nonfinite"] == [0.5]


def points(values: dict[float, float]) -> list[FaultPoint]:
    return [
        FaultPoint("t", ber, False, 1, (1,), (value,), (0.0,), (0.0,), np.array([[value]]))
        for ber, value in values.items()
    ]


def test_tolerated_rates_are_interpolated_in_the_logarithm() -> None:
    measured = points({0.0: 0.9, 1e-6: 0.9, 1e-4: 0.5, 1e-3: 0.1})
    assert tolerated_ber(measured, 0.9, 0.7) == pytest.approx(1e-5)
    assert tolerated_ber(measured, 0.9, 0.5) == pytest.approx(1e-4)
    assert tolerated_ber(measured, 0.9, 0.95) is None  # below the smallest rate
    assert tolerated_ber(measured, 0.9, 0.05) is None  # beyond the largest


def test_the_difference_of_two_curves() -> None:
    generator = np.random.default_rng(0)
    better, worse = (generator.random((3, 200)) < share for share in (0.9, 0.6))

    def point(items: np.ndarray) -> FaultPoint:
        return FaultPoint("t", 0.1, False, 1, (1,) * 3, tuple(items.mean(1)), None, (0.0,) * 3, items.astype(float))

    difference, (low, high) = mean_difference(point(better), point(worse))
    assert difference == pytest.approx(better.mean() - worse.mean())
    assert 0.15 < low < difference < high < 0.45
    same, (low, high) = mean_difference(point(better), point(better))
    assert same == 0 and low < 0 < high
