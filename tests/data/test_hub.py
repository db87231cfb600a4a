"""Hub dataset names, and the errors when the hub cannot be reached."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from smelt.data import load_data, load_text
from smelt.data.hub import is_hub
from smelt.errors import DataError

HAS_DATASETS = importlib.util.find_spec("datasets") is not None


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("here")
    assert is_hub("hub:name") and is_hub("owner/name") and is_hub("owner/name:configuration@test")
    assert not any(map(is_hub, ("folder/file", "folder/missing.jsonl", "a/b/c", "default", "missing", "/owner/name")))


@pytest.mark.skipif(HAS_DATASETS, reason="the package is installed")
def test_without_the_package() -> None:
    with pytest.raises(DataError, match=r"pip install 'smeltml\[datasets\]'"):
        load_text("owner/name")


def test_an_invalid_name() -> None:
    with pytest.raises(DataError, match=r"expected hub:owner/name"):
        load_text("hub:../../etc/passwd")


@pytest.mark.skipif(not HAS_DATASETS, reason="needs the datasets package")
def test_splits_of_a_local_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"text": f"from {split}"}) + "\n")
    assert load_text("hub:owner/name", split="calibration").documents == ("from train",)
    assert load_text("hub:owner/name").documents == ("from test",)
    assert load_data("hub:owner/name@train") == load_text("hub:owner/name@train")
    with pytest.raises(DataError, match="cannot be read from the hub"):
        load_text("hub:owner/name@validation")
