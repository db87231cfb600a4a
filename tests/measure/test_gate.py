"""The quality gate: verdicts, margins, the power estimate, and false acceptance exactly at the margin."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from smelt.errors import ConfigError
from smelt.measure.eval_result import EvalResult
from smelt.measure.gate import GateResult, Margin, gate, parse_margins
from smelt.measure.metrics import METRICS
from tests.measure.test_intervals import autoregression, classified, windowed

POINT, PERCENT = Margin(0.01, "pt"), Margin(0.01, "%")


def answered(lost: int, gained: int, items: int, metric: str = "accuracy") -> tuple[EvalResult, EvalResult]:
    """A new and a base model of which the base model is right on `lost` items and the new one on `gained` others."""
    labels = np.arange(items) % 2
    new, base = labels.copy(), labels.copy()
    new[:lost] ^= 1
    base[lost : lost + gained] ^= 1
    return classified(new, labels, metric), classified(base, labels, metric)


def texts(drop: float, items: int = 200, noise: float = 0.02, seed: int = 0) -> tuple[EvalResult, EvalResult]:
    """Windows whose mean log ratio is exactly log(1 + drop)."""
    generator = np.random.default_rng(seed)
    base, change = generator.normal(3, 0.4, items), generator.normal(0, noise, items)
    return windowed(base + change - change.mean() + math.log1p(drop)), windowed(base)


@pytest.mark.parametrize(
    ("pair", "margin", "verdict"),
    [
        (answered(20, 20, 5000), POINT, "pass"),
        (answered(0, 0, 5000), POINT, "pass"),
        (answered(200, 20, 5000), POINT, "fail"),
        (answered(5, 5, 200), POINT, "inconclusive"),
        (answered(0, 0, 100), POINT, "inconclusive"),
        (answered(30, 30, 5000, "f1"), POINT, "pass"),
        (answered(400, 20, 5000, "matthews"), POINT, "fail"),
        (answered(0, 0, 100, "matthews"), POINT, "inconclusive"),
        (texts(0.002), PERCENT, "pass"),
        (texts(-0.05), PERCENT, "pass"),
        (texts(0.04), PERCENT, "fail"),
        (texts(0.002, items=12), PERCENT, "inconclusive"),
        (texts(0.0, noise=0.0), PERCENT, "pass"),
    ],
)
def test_verdicts(pair: tuple[EvalResult, EvalResult], margin: Margin, verdict: str) -> None:
    result = gate(*pair, margin, resamples=500)
    assert result.verdict == verdict and result.passed == (verdict == "pass")
    assert (result.bound < result.margin) == (verdict == "pass")
    assert (result.items_needed is not None) == (verdict == "inconclusive")
    words = {"pass": "is not worse", "fail": "is worse by more than the margin", "inconclusive": "not enough items"}
    assert words[verdict] in result.sentence


def test_the_drop_is_in_points_or_relative() -> None:
    accuracy = gate(*answered(30, 10, 1000), POINT)
    assert accuracy.drop == pytest.approx(0.02) and accuracy.unit == "pt" and accuracy.block_length is None
    perplexity = gate(*texts(0.03), PERCENT, resamples=500)
    assert perplexity.drop == pytest.approx(0.03) and perplexity.lower_bound < 0.03 < perplexity.bound
    assert perplexity.block_length is not None and perplexity.method == "block bootstrap"


def test_a_loss_per_item_drops_by_rising() -> None:
    def scored(items: np.ndarray) -> EvalResult:
        return EvalResult("brier_score", float(items.mean()), False, data="task", items=items, predictions=items)

    base = np.random.default_rng(0).uniform(0, 0.5, 400)
    worse, better = gate(scored(base + 0.2), scored(base), POINT), gate(scored(base - 0.2), scored(base), POINT)
    assert (worse.verdict, better.verdict) == ("fail", "pass")
    assert math.isclose(worse.drop, 0.2) and worse.lower_bound <= worse.drop <= worse.bound
    assert math.isclose(better.drop, -0.2) and better.lower_bound <= better.drop <= better.bound


def test_the_sentence_and_json_of_a_gate_that_cannot_tell() -> None:
    result = gate(*answered(8, 8, 400), POINT, seed=7)
    assert result.items_needed == 2700  # (1.722 + 0.842)^2 * 0.04 / 0.01^2 = 2,630, rounded up
    assert result.sentence == (
        "accuracy on data: cannot tell: not enough items: about 2,700 needed, 400 given "
        "(drop 0pt, 95 % bound 1.87pt, margin 1pt)"
    )
    plain = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert (plain["verdict"], plain["items"], plain["items_needed"], plain["seed"]) == ("inconclusive", 400, 2700, 7)
    assert plain["bound"] == result.bound and plain["margin"] == 0.01 and plain["method"] == "score interval"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_never_passes(value: float) -> None:
    new, base = texts(0.0)
    broken = windowed(np.where(np.arange(200) == 3, value, new.items))
    for pair in ((broken, base), (base, broken)):
        result = gate(*pair, PERCENT, resamples=50)
        assert result.verdict == "fail" and "not a finite number" in result.sentence
        assert json.loads(json.dumps(result.to_json(), allow_nan=False))["bound"] is None


def test_one_item_is_inconclusive() -> None:
    result = gate(*texts(0.0, items=1), PERCENT, resamples=10)
    assert result.verdict == "inconclusive" and result.items_needed is None and "more than one" in result.sentence


def test_a_drop_above_the_margin_fails_where_an_equal_model_would_pass() -> None:
    """The drop is 1.5 points and clearly above 0, but its lower bound is below 1 point."""
    result = gate(*answered(165, 90, 5000), POINT)
    assert result.lower_bound < 0.01 < result.drop and result.verdict == "fail"


def test_the_estimated_number_of_items_allows_for_the_observed_drop() -> None:
    """A drop of 30pt leaves 5 of the 35pt, and the paired changes vary by 0.5 - 0.3^2."""
    result = gate(*answered(160, 40, 400), Margin(0.35, "pt"))
    assert result.items_needed == 1100  # (1.646 + 0.842)^2 * 0.41 / 0.05^2 = 1,015, rounded up


def test_more_items_than_given_are_needed_if_these_cannot_tell() -> None:
    """Four items that all changed for the better do not vary, so that the estimate alone would be smaller."""
    assert gate(*answered(0, 4, 4), POINT).items_needed == 5


def test_the_estimated_number_of_windows_allows_for_the_observed_drop() -> None:
    """At a drop of 0.5 % and independent noise of 4 %, (1.7 + 0.84)^2 * 0.04^2 / 0.005^2 is about 410 windows."""
    needed = gate(*texts(0.005, items=120, noise=0.04), PERCENT, resamples=2000).items_needed
    assert needed is not None and 250 < needed < 900


def accepted(result: GateResult) -> bool:
    return result.verdict == "pass"


def test_false_acceptance_of_accuracy_at_the_margin() -> None:
    """The true drop is the margin: at most 5 % may pass, with a standard deviation of 1.1 % over 400 replicates."""
    generator = np.random.default_rng(1)
    passed = 0
    for _ in range(400):
        lost, gained, _ = generator.multinomial(400, [0.05, 0.03, 0.92])
        passed += accepted(gate(*answered(int(lost), int(gained), 400), Margin(0.02, "pt")))
    assert 0.02 <= passed / 400 <= 0.08


def test_false_acceptance_of_perplexity_at_the_margin() -> None:
    """A bootstrap of single windows passes more than 15 % of such texts, whose windows correlate by 0.5."""
    generator = np.random.default_rng(2)
    passed = 0
    for seed in range(400):
        base = generator.normal(3, 0.4, 60)
        new = base + math.log1p(0.01) + 0.02 * autoregression(generator, 60, 0.5)
        passed += accepted(gate(windowed(new), windowed(base), PERCENT, resamples=400, seed=seed))
    assert 0.02 <= passed / 400 <= 0.08


def test_the_estimated_number_of_items_has_the_stated_power() -> None:
    generator = np.random.default_rng(3)
    needed = gate(*answered(12, 12, 400), POINT).items_needed
    assert needed is not None
    passed = 0
    for _ in range(300):
        lost, gained, _ = generator.multinomial(needed, [0.03, 0.03, 0.94])
        passed += accepted(gate(*answered(int(lost), int(gained), needed), POINT))
    assert 0.7 <= passed / 300 <= 0.9


def test_margins() -> None:
    margins = parse_margins(["1pt", "2.5%", "f1=.5pt", "perplexity = 3 %"])
    assert margins.of("accuracy") == POINT and margins.of("f1") == Margin(0.005, "pt")
    assert margins.of("perplexity") == Margin(0.03, "%") and str(margins.of("f1")) == "0.5pt"
    assert parse_margins(["2.5%"]).of("perplexity") == Margin(0.025, "%")


@pytest.mark.parametrize(
    ("texts", "metric", "words"),
    [
        (["1pt"], "perplexity", "the margin of perplexity is written relative to the base model, as 1%"),
        (["1%"], "accuracy", "the margin of accuracy is written in points, as 1pt; add --max-drop accuracy=1pt"),
        (["f1=1pt"], "accuracy", "add --max-drop 1pt"),
        (["accuracy=1%"], "accuracy", "in points"),
        (["1"], "accuracy", "cannot be read"),
        (["-1pt"], "accuracy", "cannot be read"),
        (["0pt"], "accuracy", "cannot be read"),
        (["nan%"], "perplexity", "cannot be read"),
        (["bleu=1pt"], "accuracy", "no metric 'bleu'"),
        (["1pt", "2pt"], "accuracy", "given twice"),
    ],
)
def test_margins_that_do_not_fit(texts: list[str], metric: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_margins(texts).of(metric)


def test_a_margin_in_the_wrong_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="written in %"):
        gate(*texts(0.0), POINT)
    assert set(METRICS) == {"accuracy", "f1", "matthews", "spearman", "pearson", "wer"}  # all in points
