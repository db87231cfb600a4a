"""`smelt eval --max-drop`: exit codes, the verdict in JSON and JUnit, several data sets, and wrong margins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from smelt.cli.junit import GateCase, junit_xml
from tests.cli.conftest import Done, Place, Smelt, llama_recipe

TEXT = ["--limit", "3000", "--context", "64"]


def gated(smelt_here: Smelt, folder: Path, *arguments: str) -> tuple[Done, dict[str, Any], ElementTree.Element]:
    files = ["--json", str(folder / "r.json"), "--junit", str(folder / "r.xml")]
    done = smelt_here("eval", *arguments, *files)
    return done, json.loads((folder / "r.json").read_text()), ElementTree.parse(folder / "r.xml").getroot()


def test_a_model_is_not_worse_than_itself(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = ["--against", place / "llama", "--data", place / "text.txt", *TEXT, "--max-drop", "1%", "--seed", "3"]
    done, report, junit = gated(smelt_here, tmp_path, place / "llama", *arguments)
    assert done.code == 0 and "gate passed: perplexity on" in done.out
    verdict = report["gate"]
    assert (verdict["verdict"], verdict["drop"], verdict["margin"], verdict["unit"]) == ("pass", 0, 0.01, "%")
    assert verdict["items"] == report["quality"]["settings"]["windows"] and verdict["seed"] == 3
    assert verdict["method"] == "block bootstrap" and verdict["block_length"] == 1 and verdict["items_needed"] is None
    assert junit.get("tests") == "1" and junit.get("failures") == "0" and junit.find(".//failure") is None


def test_a_pruned_model_is_worse(place: Place, smelt_here: Smelt, pruned: Path, tmp_path: Path) -> None:
    arguments = ["--against", place / "llama", "--data", place / "text.txt", *TEXT, "--max-drop", "0.1%"]
    done, report, junit = gated(smelt_here, tmp_path, str(pruned), *arguments)
    assert done.code == 3 and "is worse by more than the margin" in done.out
    assert report["gate"]["verdict"] == "fail" and report["passed"] is False
    failure = junit.find(".//failure")
    assert failure is not None and failure.get("type") == "fail" and "margin 0.1%" in str(failure.get("message"))


def test_a_worse_model_within_the_margin_passes(place: Place, smelt_here: Smelt, pruned: Path, tmp_path: Path) -> None:
    """The comparison alone says worse, which fails without a margin."""
    arguments = ["--against", place / "llama", "--data", place / "text.txt", *TEXT, "--max-drop", "90%"]
    done, report, _ = gated(smelt_here, tmp_path, str(pruned), *arguments)
    assert report["comparison"]["verdict"] == "worse" and done.code == 0 and report["passed"] is True


def test_too_few_items_cannot_tell(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    arguments = ["--against", place / "bert", "--data", place / "rows.jsonl", "--max-drop", "1pt"]
    done, report, junit = gated(smelt_here, tmp_path, place / "bert", *arguments)
    assert done.code == 3 and "cannot tell: not enough items: about 300 needed, 160 given" in done.out
    assert (report["gate"]["verdict"], report["gate"]["items_needed"]) == ("inconclusive", 300)
    failure = junit.find(".//failure")
    assert failure is not None and failure.get("type") == "inconclusive"


def test_all_data_sets_must_pass(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join((place.folder / "rows.jsonl").read_text().splitlines(keepends=True)[:20]))
    arguments = ["--against", place / "bert", "--data", place / "rows.jsonl", "--data", str(few)]
    done, report, junit = gated(smelt_here, tmp_path, place / "bert", *arguments, "--max-drop", "accuracy=5pt")
    assert done.code == 3 and report["passed"] is False
    assert [result["gate"]["verdict"] for result in report["results"]] == ["pass", "inconclusive"]
    assert [result["passed"] for result in report["results"]] == [True, False]
    assert (junit.get("tests"), junit.get("failures")) == ("2", "1")
    assert [case.get("classname") for case in junit.iter("testcase")] == [place / "rows.jsonl", str(few)]
    done, report, _ = gated(smelt_here, tmp_path, place / "bert", *arguments, "--max-drop", "30pt")
    assert done.code == 0 and report["passed"] is True


def test_junit_of_a_minimum(place: Place, smelt_here: Smelt, tmp_path: Path) -> None:
    done, _, junit = gated(smelt_here, tmp_path, place / "bert", "--data", place / "rows.jsonl", "--min", "1.1")
    failure = junit.find(".//failure")
    assert done.code == 3 and failure is not None and "below the minimum 1.1" in str(failure.text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "nowhere", "--max-drop", "1pt"], "the margin of perplexity is written relative"),
        (["--against", "nowhere", "--max-drop", "1"], "cannot be read"),
        (["--max-drop", "1%"], "name it with --against BASE"),
        (["--against", "nowhere", "--max-drop", "1%", "--junit", "."], "is a folder"),
    ],
)
def test_wrong_margins_are_refused_before_a_model_is_loaded(
    arguments: list[str], words: str, place: Place, smelt_here: Smelt
) -> None:
    smelt_here("eval", "nowhere", "--data", place / "text.txt", *arguments).refused(words)


def test_any_name_gives_valid_xml() -> None:
    case = GateCase("accuracy", 'a<b>&"\x00\ud800]]>', "fail", ["first < \x1b", "second"], "details\x07")
    root = ElementTree.fromstring(junit_xml("m&<", [case]).encode("utf-8"))
    (found,) = root.iter("testcase")
    assert str(found.get("classname")).startswith('a<b>&"') and "second" in str(found.findtext("failure"))


def two_steps(place: Place, **evaluate: Any) -> str:
    content = {
        "data": {"source": place / "text.txt", "samples": 8, "seq_len": 32},
        "evaluate": {"source": place / "text.txt", "context": 64, "limit": 3000, **evaluate},
        "steps": [
            {"method": "magnitude", "budget": {"parameters": 0.6}, "repair": "none"},
            {"method": "rtn", "bits": 8, "group_size": -1},
        ],
    }
    return place.recipe("two-steps.yaml", content)


def test_a_run_that_fails_its_gate_writes_no_artifact(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    arguments = ["compress", place / "llama", "-r", two_steps(place, max_drop="1%"), "-o", str(out), "--no-speed"]
    done = smelt_here(*arguments)
    done.refused("the quality gate failed: perplexity on", code=3)
    assert not out.exists() and f"the steps and report.html are in {partial}" in done.err
    record = json.loads((partial / "measurements.json").read_text())
    assert record["quality"]["gate"]["verdict"] == "fail"
    pruning, rounding = (step["quality"] for step in record["steps"])
    assert abs(rounding["drop"]) < 0.02 < pruning["drop"] and rounding["value"] == record["quality"]["after"]
    product = (1 + rounding["drop"]) * (1 + pruning["drop"])
    assert product == pytest.approx(record["quality"]["after"] / record["quality"]["before"])
    assert "drop by step: step 1 (magnitude) +" in done.err and "step 2 (rtn)" in done.err
    page = (partial / "report.html").read_text()
    assert "Gate failed: perplexity on" in page and "after it (drop +" in page
    done = smelt_here(*arguments, "--max-drop", "50%", "--resume")  # another margin continues the same run
    done.refused("the quality gate failed", code=3)
    assert "step 1 of 2" not in done.err


def test_a_run_that_passes_its_gate(place: Place, smelt_here: Smelt, quick: None, tmp_path: Path) -> None:
    arguments = [
        "--method",
        "rtn",
        "--bits",
        "8",
        "--group-size",
        "-1",
        "--data",
        place / "text.txt",
        "--no-speed",
        "--max-drop",
        "50%",
    ]
    done = smelt_here("compress", place / "llama", "-o", str(tmp_path / "out"), *arguments)
    assert done.code == 0 and "gate passed: perplexity on" in done.out, done
    record = json.loads((tmp_path / "out" / "measurements.json").read_text())
    assert record["quality"]["gate"]["verdict"] == "pass" and "quality" not in record["steps"][0]
    assert "Gate passed" in (tmp_path / "out" / "report.html").read_text()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(("margin", "words"), [("1pt", "written relative to the base model"), ("1", "cannot be read")])
def test_a_wrong_margin_is_refused_before_a_run(
    margin: str, words: str, place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    arguments = ["-r", two_steps(place), "-o", str(tmp_path / "out"), "--max-drop", margin]
    done = smelt_here("compress", place / "llama", *arguments)
    done.refused(words)
    assert "loading" not in done.err and not (tmp_path / "out.partial").exists()


def test_evaluation_on_calibration_data_is_warned_of(
    place: Place, smelt_here: Smelt, quick: None, tmp_path: Path
) -> None:
    recipe = llama_recipe(place, repair="none")
    recipe["evaluate"]["source"] = place / "text.txt"
    done = smelt_here("compress", place / "llama", "-r", place.recipe("same.yaml", recipe), "-o", str(tmp_path / "out"))
    words = f"100 % of the evaluation data ({place / 'text.txt'}) also occurs in the calibration data"
    assert done.code == 0 and words in done.err.replace("\n", "") + done.out
    (warning,) = json.loads((tmp_path / "out" / "measurements.json").read_text())["warnings"]
    assert words in warning and "evaluate on other data" in (tmp_path / "out" / "report.html").read_text()
    arguments = ["eval", str(tmp_path / "out"), *TEXT, "--json", str(tmp_path / "r.json"), "--data"]
    done = smelt_here(*arguments, place / "text.txt")
    assert done.code == 0 and "was calibrated on" in done.out
    assert "was calibrated on" in json.loads((tmp_path / "r.json").read_text())["warnings"][0]
    (tmp_path / "other.txt").write_text("a text that was not used. " * 400)
    done = smelt_here(*arguments, str(tmp_path / "other.txt"))
    assert done.code == 0 and "was calibrated on" not in done.out
