"""`smelt eval --harness`: a task file on the command line, the gate over its items, and options that do not apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'smeltml[harness]'")

from tests.cli.conftest import Place, Smelt

ITEMS = 300


@pytest.fixture
def tasks(place: Place, tmp_path: Path) -> list[str]:
    """Options for a task that continues pieces of the training text; the wrong choice comes from another place."""
    text = (place.folder / "text.txt").read_text()
    rows = [
        {
            "query": text[start : start + 12],
            "choices": [text[start + 12 : start + 24], text[start + 200 :][:12]],
            "gold": 0,
        }
        for start in range(0, 40 * ITEMS, 40)
    ]
    folder = tmp_path / "tasks"
    folder.mkdir()
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    content = {
        "task": "lines",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(data)}, "cache_dir": str(tmp_path / "cache")},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "doc_to_text": "{{query}}",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": metrics,
    }
    (folder / "lines.yaml").write_text(yaml.safe_dump(content))
    return ["--harness", "--tasks", "lines", "--tasks-path", str(folder)]


def test_the_gate_over_a_task(place: Place, smelt_here: Smelt, pruned: Path, tasks: list[str], tmp_path: Path) -> None:
    def gated(model: str, *arguments: str) -> tuple[int, dict[str, Any], ElementTree.Element]:
        files = ["--json", str(tmp_path / "r.json"), "--junit", str(tmp_path / "r.xml")]
        done = smelt_here("eval", model, "--against", place / "llama", *tasks, *arguments, *files)
        return done.code, json.loads((tmp_path / "r.json").read_text()), ElementTree.parse(tmp_path / "r.xml").getroot()

    code, report, junit = gated(place / "llama", "--max-drop", "5pt")
    (comparison,) = report["comparisons"]
    assert code == 0 and report["passed"] and comparison["gate"]["verdict"] == "pass"
    assert (comparison["task"], comparison["metric"], comparison["gate"]["drop"]) == ("lines", "acc", 0)
    assert [case.get("name") for case in junit.iter("testcase")] == ["acc"] and junit.get("failures") == "0"
    code, report, junit = gated(str(pruned), "--max-drop", "0.1pt", "--metric", "acc_norm")
    (comparison,) = report["comparisons"]
    assert code == 3 and not report["passed"] and comparison["metric"] == "acc_norm"
    failure = junit.find(".//failure")
    assert failure is not None and failure.get("type") == comparison["gate"]["verdict"] != "pass"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-drop", "1pt"], "name it with --against"),
        (["--junit", "r.xml"], "name the other one with --against"),
        (["--max-drop", "1pc", "--against", "base"], "cannot be read"),
        (["--data", "rows.jsonl"], "--data does not apply to tasks of lm-eval"),
        (["--context", "64"], "--context does not apply to tasks of lm-eval"),
        (["--min", "0.5"], "--min does not apply to tasks of lm-eval"),
    ],
)
def test_options_that_do_not_apply(
    place: Place, smelt_here: Smelt, tasks: list[str], arguments: list[str], words: str
) -> None:
    smelt_here("eval", place / "llama", *tasks, *arguments).refused(words)


def test_tasks_without_the_harness(place: Place, smelt_here: Smelt) -> None:
    smelt_here("eval", place / "llama", "--tasks", "lines").refused("add --harness")
