"""`smelt eval --robustness`: tables, JSON and report, and refusals before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smelt.cli.robustness import show_robustness
from tests.cli.conftest import Place, Smelt


def test_robustness_of_a_classifier(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    json_file, report = tmp_path / "r.json", tmp_path / "r.html"
    arguments = ["--data", place / "rows.jsonl", "--limit", "16", "--robustness", "--ber", "1e-2,0", "--seeds", "1"]
    done = smelt_here("eval", place / "bert", *arguments, "--json", str(json_file), "--report", str(report))
    assert done.code == 0, done.err
    assert "accuracy under bit errors" in done.out and "all, clipped" in done.out and "range clipping" in done.out
    targets = [line.split("│")[1].strip() for line in done.out.splitlines() if line.startswith("│")]
    start = targets.index("nothing")
    assert targets[start + 1 : start + 5] == ["all"] * 2 + ["all, clipped"] * 2
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


def _model(name: str, nonfinite: float) -> dict[str, Any]:
    point = {"target": "all", "ber": 1e-5, "clipped": False, "mean": 0.25, "nonfinite": [nonfinite]}
    clipping = {"comparison": {"difference": 0.0, "interval": [0.0, 0.0]}, "latency_ratio": 1.0}
    tolerated = {"target": "all", "clipped": False, "ber_1": 2e-6, "ber_50": None}
    return {"name": name, "clean": {"metric": "accuracy", "value": 0.75}, "faults": [point], "tolerated": [tolerated],
            "clipping": clipping, "attacks": [], "bit_search": None, "backdoor": None}  # fmt: skip


def test_what_a_reader_must_know_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs that are not finite, the tolerated rate, and a back door that only compression opens."""
    models = {"base": _model("big", 0.0), "model": _model("small", 0.5)}
    show_robustness({**models, "comparison": {"backdoor_alarm": True}})
    out = capsys.readouterr().out
    assert "0.2500*" in out and "not finite; they count as wrong" in out
    assert (
        "small: flips in all: one point is lost at a bit error rate of about 2e-6" in out.replace("\n", " ")
        and "half" not in out
    )
    assert "Alarm: the trigger works on the compressed model" in out
    show_robustness({"base": None, "model": _model("small", 0.0), "comparison": None})
    out = capsys.readouterr().out
    assert "0.2500*" not in out and "not finite" not in out and "Alarm" not in out
