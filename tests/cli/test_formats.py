"""`smelt formats`: every format, its true bits, its measured error, also on a narrow terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from smelt.cli import formats
from smelt.numerics import FORMATS, get_format
from tests.cli.conftest import Smelt

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"


@pytest.fixture
def found(smelt_here: Smelt, tmp_path: Path) -> dict[str, dict[str, Any]]:
    done = smelt_here("formats", "--json", str(tmp_path / "formats.json"))
    assert (done.code, done.err) == (0, "")
    return {row["name"]: row for row in json.loads((tmp_path / "formats.json").read_text())}


def test_help(smelt_here: Smelt) -> None:
    done = smelt_here("formats", "--help")
    assert (done.code, done.err) == (0, "") and "--json" in done.out and "--seed" in done.out


def test_every_format_with_its_bits_and_error(found: dict[str, dict[str, Any]]) -> None:
    assert list(found) == list(FORMATS)
    for name, row in found.items():
        assert row["bits"] == get_format(name).bits
        assert row["bits_per_value"] == get_format(name).bits_per_value(4096, 4096)
    assert {name: found[name]["bits_per_value"] for name in ("mxfp4", "amxfp4", "nf4")} == {
        "mxfp4": 4.25, "amxfp4": 4.5, "nf4": 4.5,
    }  # fmt: skip
    measured = {name: row["signal_to_noise"] for name, row in found.items()}
    known = {"int4-asym": 17.09, "dint4": 17.54, "mxfp4": 18.79, "nvfp4": 20.44, "amxfp4": 20.18, "nf4": 20.73}
    assert {name: measured[name] for name in known} == pytest.approx(known, abs=0.1)
    assert measured["int8"] > measured["int4"] > measured["int2"] > 0


@pytest.mark.parametrize("columns", [80, 120])
def test_it_is_readable(columns: int, smelt_here: Smelt, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is too long, no table cell wraps, and every name is listed or derivable."""
    monkeypatch.setenv("COLUMNS", str(columns))
    done = smelt_here("formats")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= columns
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert all(row[0] for row in rows), "a folded cell leaves the first one empty"
    names = {row[0] for row in rows}
    assert {name for name in FORMATS if name not in names and re.sub(r"int\d", "intN", name) not in names} == set()
    assert len(rows) < 35
    for word in ("`/`", "`@`", "`row`", "`tensor`", "e8m0-up", formats.EXAMPLE):
        assert word in " ".join(done.out.split())


def test_the_seed_changes_the_sample_and_nothing_else(smelt_here: Smelt, tmp_path: Path) -> None:
    for name, seed in (("a", "7"), ("b", "7"), ("c", "8")):
        smelt_here("formats", "--seed", seed, "--json", str(tmp_path / name))
    first, repeated, other = (json.loads((tmp_path / name).read_text()) for name in "abc")
    assert first == repeated != other
    for one, two in zip(first, other, strict=True):
        assert one.pop("signal_to_noise") == pytest.approx(two.pop("signal_to_noise"), abs=0.3)
    assert first == other


def test_the_page_shows_what_the_command_measures(found: dict[str, dict[str, Any]]) -> None:
    rows = re.findall(r"^\| `(\S+)` \| (\d) \| (\S+) \| (\S+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) > 20
    for name, bits, stored, ratio in rows:
        assert int(bits) == found[name]["bits"]
        assert float(stored) == pytest.approx(found[name]["bits_per_value"], abs=0.006)
        assert float(ratio) == pytest.approx(found[name]["signal_to_noise"], abs=0.06)


def test_an_invalid_json_path_is_refused_before_any_work(smelt_here: Smelt, tmp_path: Path) -> None:
    smelt_here("formats", "--json", str(tmp_path)).refused("is a folder")
