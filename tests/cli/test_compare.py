"""`smelt compare`: several results on one page, and refusals in one sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Smelt
from tests.report.conftest import RUN


@pytest.fixture
def results(tmp_path: Path) -> list[str]:
    folders = [tmp_path / "a", tmp_path / "b"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        record = copy.deepcopy(RUN)
        record["quality"]["after"] = 27.1 + number
        (folder / "measurements.json").write_text(json.dumps(record))
    return [str(folder) for folder in folders]


def test_results_are_compared(results: list[str], smelt_here: Smelt, tmp_path: Path) -> None:
    done = smelt_here("compare", *results, "-o", str(tmp_path / "page.html"), "--json", str(tmp_path / "rows.json"))
    assert done.code == 0, done
    assert "27.10" in done.out and "28.10" in done.out and "page.html is written" in done.err
    page = (tmp_path / "page.html").read_text()
    assert "Comparison: a, b" in page and "28.10" in page and "<script" not in page
    assert json.loads((tmp_path / "rows.json").read_text())["headings"] == ["", "source", "a", "b"]


def test_bad_input_is_refused(results: list[str], smelt_here: Smelt, tmp_path: Path) -> None:
    smelt_here("compare", results[0]).refused("two results or more")
    smelt_here("compare", results[0], str(tmp_path)).refused("has no measurements.json")
    damaged = tmp_path / "b" / "measurements.json"
    for content in ({"title": "no model"}, {**RUN, "quality": {"metric": "x", "before": 1, "after": None}}):
        damaged.write_text(json.dumps(content))
        smelt_here("compare", *results, "-o", str(tmp_path / "page.html")).refused("b/measurements.json is damaged")
    assert not (tmp_path / "page.html").exists()
