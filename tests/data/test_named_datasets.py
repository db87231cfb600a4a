"""Short dataset names: a local copy first, then the hub; an existing file takes precedence."""

from __future__ import annotations

from pathlib import Path

import pytest

from smelt.data import load_data
from smelt.data.named_datasets import resolve_source
from smelt.errors import DataError


def test_a_local_copy_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMELT_DATA", str(tmp_path))
    folder = tmp_path / "wikitext2"
    folder.mkdir()
    assert resolve_source("wikitext2", "evaluation") == "hub:Salesforce/wikitext:wikitext-2-raw-v1@test"
    assert resolve_source("wikitext2", "calibration") == "hub:Salesforce/wikitext:wikitext-2-raw-v1@train"
    for name in ("test.txt.gz", "test.raw.txt.gz", "train.txt.gz"):
        (folder / name).touch()
    assert resolve_source("wikitext2", "evaluation") == folder / "test.raw.txt.gz"
    assert resolve_source("wikitext2", "calibration") == folder / "train.txt.gz"


def test_other_names_are_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_source("text.txt", "evaluation") == "text.txt"
    Path("wikitext2").mkdir()
    assert resolve_source("wikitext2", "evaluation") == "wikitext2"


@pytest.mark.parametrize(("source", "hint"), [("wikitext", "did you mean wikitext2?"), ("c4", "wikitext2")])
def test_an_unknown_name_is_reported(source: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in (None, "text"):
        with pytest.raises(DataError, match="no file and no data set has this name") as error:
            load_data(source, kind=kind)
        assert hint in str(error.value) and "hub:owner/name" in str(error.value) and ".jsonl" in str(error.value)


@pytest.mark.shared
def test_the_real_dataset(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMELT_DATA", str(shared / "data"))
    assert len(load_data("wikitext2").joined) > 1_000_000
