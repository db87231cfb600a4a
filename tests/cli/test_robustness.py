"""`smelt eval --robustness`: tables, JSON and report, and refusals before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Place, Smelt


def test_robustness_of_a_classifier(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    json_file, report = tmp_path / "r.json", tmp_path / "r.html"
    arguments = ["--data", place / "rows.jsonl", "--limit", "16", "--robustness", "--ber", "1e-2,0", "--seeds", "1"]
    done = smelt_here("eval", place / "bert", *arguments, "--json", str(json_file), "--report", str(report))
    assert done.code == 0, done.err
    assert "accuracy under bit errors" in done.out and "all, clipped" in done.out and "range clipping" in done.out
    content = json.loads(json_file.read_text())["robustness"]
    assert content["settings"]["bers"] == [0.0, 0.01] and content["base"] is None
    assert "Quality under bit errors" in report.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--robustness", "--ber", "often"], "write it as 1e-6,1e-5,1e-4"),
        (["--robustness", "--ber", "2"], "between 0 and 1, not 2"),
        (["--ber", "1e-5"], "belong to --robustness"),
        (["--robustness", "--trigger", "cf"], "as in 1:cf"),
    ],
)
def test_refused_before_any_work(smelt_here: Smelt, arguments: list[str], words: str) -> None:
    smelt_here("eval", "no-such-model", "--data", "no-such-file", *arguments).refused(words)
