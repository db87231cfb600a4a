"""The whole measurement: a quantized classifier beside its dense model, and a language model with its KV cache."""

from __future__ import annotations

import json

import pytest

from smelt.data import LabeledData, TextData
from smelt.errors import ConfigError, DataError
from smelt.measure.robustness.measure import RobustnessSettings, hold_out, measure_robustness
from smelt.report.robustness import render_robustness
from tests.measure.robustness.small_model import classifier, rows
from tests.measure.robustness.test_storage import contents
from tests.trained import HELD_OUT, character_model


def test_a_quantized_classifier_and_its_dense_model() -> None:
    new, base = classifier("int8"), classifier()
    before = contents(new.network), contents(base.network)
    settings = RobustnessSettings(
        bers=(0.0, 1e-4, 1e-3), seeds=2, eps=(0.0, 1.0), attacked_items=32, pgd_steps=3, trigger=("zq", 1)
    )
    result = measure_robustness(new, rows(), against=base, settings=settings, limit=24)
    assert (contents(new.network), contents(base.network)) == before
    plain = json.loads(json.dumps(result.to_json(), allow_nan=False))
    for role in ("model", "base"):
        part = plain[role]
        clean = part["clean"]["value"]
        assert all(point["mean"] == clean and point["flips"] == [0, 0] for point in part["faults"] if not point["ber"])
        assert part["clipping"]["latency_ratio"] > 0 and part["clean"]["items"] == 24
        none, much = part["attacks"]
        assert none["clean"] == none["fgsm"] == none["pgd"] == none["robust"] >= much["robust"]
        assert none["items"] == 24  # not more than the limit
        assert part["backdoor"]["items"] > 0
    targets = {point["target"] for point in plain["model"]["faults"]}
    assert targets == {"all", "quantized layers", "codes", "scales"}
    assert {point["target"] for point in plain["base"]["faults"]} == {"all", "quantized layers"}
    assert plain["model"]["bits"]["codes"] > 0 == plain["base"]["bits"]["codes"]
    assert plain["model"]["bit_search"]["flips"] > 0 and plain["base"]["bit_search"] is None
    assert plain["model"]["attacks"][0]["transfer"] is not None and plain["base"]["attacks"][0]["transfer"] is None
    compared = plain["comparison"]
    assert {row["target"] for row in compared["faults"]} == {"all", "quantized layers"}
    assert compared["attacks"][0]["relative"] == pytest.approx(1.0) and compared["backdoor_alarm"] is False
    page = render_robustness(plain)
    assert "Alarm" not in page
    plain["comparison"]["backdoor_alarm"] = True
    assert "Alarm: the trigger works on the compressed model and not on the dense one." in render_robustness(plain)
    for words in (
        "Quality under bit errors",
        "nothing",
        "quantized layers, clipped",
        "Range clipping",
        "FGSM",
        "back door",
    ):
        assert words in page


def test_a_language_model_has_faults_in_its_kv_cache() -> None:
    model = character_model("tiny")
    settings = RobustnessSettings(bers=(0.0, 1e-2), seeds=1)
    result = measure_robustness(model, HELD_OUT, settings=settings, context=32, limit=160, kv="int8")
    faults = {(point.target, point.ber): point for point in result.model.faults if not point.clipped}
    assert faults["KV cache", 0.0].mean == pytest.approx(result.model.clean.value)
    assert not faults["KV cache", 1e-2].mean <= result.model.clean.value
    assert faults["KV cache", 1e-2].flips[0] > 0
    assert model.kv is None
    plain = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert plain["base"] is None and plain["comparison"] is None and plain["model"]["attacks"] == []
    assert "KV cache" in render_robustness(plain)


def test_the_last_fifth_is_held_out() -> None:
    evaluated, calibration = hold_out(rows())
    assert isinstance(evaluated, LabeledData) and isinstance(calibration, LabeledData)
    assert (len(evaluated), len(calibration)) == (64, 16) and calibration.first == rows().first[64:]
    text, rest = hold_out(TextData("t", ("a b " * 50,)))
    assert isinstance(text, TextData) and isinstance(rest, TextData)
    assert text.joined + rest.joined == "a b " * 50 and 30 <= len(rest.joined) <= 50
    with pytest.raises(DataError, match="at least five"):
        hold_out(rows().take(range(4)))


@pytest.mark.parametrize("settings", [{"bers": ()}, {"seeds": 0}, {"bers": (1.5,)}])
def test_bad_settings(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RobustnessSettings(**settings)  # type: ignore[arg-type]
