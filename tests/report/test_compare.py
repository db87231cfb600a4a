"""The comparison page: every run with its own change, and a warning for what cannot be compared."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from smelt.report.compare import comparison_rows, differences, headings, render_comparison
from tests.report.test_page import HOSTILE, Page, poisoned


@pytest.fixture
def runs(run: dict[str, Any]) -> list[dict[str, Any]]:
    other = copy.deepcopy(run)
    other["quality"]["after"] = 24.0
    other["size"]["bytes"]["after"] = 171_000_000
    other["size"]["parameters"]["after"] = other["size"]["parameters"]["before"]
    other["speed"] = [{**other["speed"][0], "ratio": 0.8, "ratio_low": 0.7, "ratio_high": 0.9}]
    other["samples"][1] = {**other["samples"][1], "text": " Paris, too."}
    return [{**run, "name": "pruned"}, {**other, "name": "w4"}]


def test_rows_hold_the_source_and_every_run(runs: list[dict[str, Any]]) -> None:
    rows = {row[0]: row[1:] for row in comparison_rows(runs)}
    assert headings(runs) == ["", "source", "pruned", "w4"]
    assert rows["perplexity"] == ["23.60", "27.10, +14.8 % (worse)", "24.00, +1.7 % (worse)"]
    assert rows["interval of the change"] == ["", "+13.9 % to +15.8 %", "+13.9 % to +15.8 %"]
    assert rows["weight bytes"] == ["538 MB", "453 MB, −15.8 %", "171 MB, −68.2 %"]
    assert rows["parameters"] == ["134.5 M", "113.3 M, −15.8 %", "unchanged"]
    assert rows["forward, batch 1, 128 tokens, cpu"] == ["", "1.21× faster", "1.25× slower"]
    assert rows["one decoded token, batch 1, 128 tokens before it, cpu"] == ["", "no measurable change", "–"]


def test_every_run_is_a_point_and_a_bar(runs: list[dict[str, Any]]) -> None:
    html = render_comparison(runs)
    assert re.findall(r'class="point-name"[^>]*>([^<]*)<', html) == ["source", "pruned", "w4"]
    plot = html[html.index("Quality against size") : html.index("Size and speed")]
    places = re.findall(r'<circle cx="([\d.]+)%" cy="([\d.]+)"', plot)
    by_size, by_quality = ([float(place[axis]) for place in places] for axis in (0, 1))
    assert by_size[2] < by_size[1] < by_size[0] and by_quality[1] < by_quality[2] < by_quality[0]
    assert float(re.findall(r'<text x="([\d.]+)%"[^>]*>0</text>', plot)[0]) < by_size[2], "sizes start at 0"
    bars = re.findall(r'<rect x="0" y="2" width="([\d.]+)%"', html)
    assert bars[:2] == [f"{100 * 453_118_464 / 538_060_032:.2f}", f"{100 * 171 / 538.060032:.2f}"]
    assert html.count("axis-title") > 4


def test_every_completion_is_shown_once(runs: list[dict[str, Any]]) -> None:
    text = Page(render_comparison(runs)).text
    completions = (" Paris. It is the largest", " Paris, the city", " Paris, too.")  # of the source, then of each run
    assert [text.count(completion) for completion in completions] == [1, 1, 1]
    assert sorted(completions, key=text.index) == list(completions)
    for run in runs:
        item = {"text": "a film", "label": "good", "before": "good", "after": run["name"]}
        run.update(samples=[], predictions=[item])
    assert "a filmgoodgoodprunedw4" in Page(render_comparison(runs)).text


def test_what_cannot_be_compared_is_said(runs: list[dict[str, Any]]) -> None:
    assert differences(runs) == []
    runs[1]["model"] = "another"
    runs[1]["quality"]["data"] = "other text"
    assert len(differences(runs)) == 2 and headings(runs) == ["", "pruned", "w4"]
    html = render_comparison(runs)
    assert html.count('class="warning"') == 2 and "Quality against size" not in html


def test_machines_that_differ_are_all_listed(runs: list[dict[str, Any]]) -> None:
    assert render_comparison(runs).count("<h2>Measured on</h2>") == 1
    runs[1]["machine"] = {**runs[1]["machine"], "cpu": "another CPU"}
    text = Page(render_comparison(runs)).text
    assert "Measured on" not in text
    first, second = text.split("pruned was measured on")[1].split("w4 was measured on")
    assert runs[0]["machine"]["cpu"] in first and "another CPU" not in first and "another CPU" in second


def test_hostile_text_is_escaped(runs: list[dict[str, Any]]) -> None:
    page, clean = Page(render_comparison([poisoned(run) for run in runs])), Page(render_comparison(runs))
    assert {name for name, _ in page.elements} <= {name for name, _ in clean.elements}
    assert page.text.count(HOSTILE) > 10


def test_a_run_without_measurements_is_shown() -> None:
    bare = [{"title": "t", "model": "m", "name": name} for name in ("a", "b")]
    assert comparison_rows(bare) == [["steps", "", "–", "–"]]
    assert "Comparison: a, b" in render_comparison(bare)
