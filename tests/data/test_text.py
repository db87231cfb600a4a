"""Text from files and the built-in dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smelt.data import load_data, load_text
from smelt.data.default import default_documents
from smelt.errors import DataError


def rows(path: Path, *values: dict[str, object]) -> Path:
    path.write_text("\n".join(map(json.dumps, values)))
    return path


def test_a_plain_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(" = Title = \n \n Text .\n")
    assert load_text(path).documents == (" = Title = \n \n Text .\n",)
    assert load_text(path).joined == " = Title = \n \n Text .\n"


def test_the_text_column(tmp_path: Path) -> None:
    named = rows(tmp_path / "a.jsonl", {"id": "7", "text": "one", "note": "x"}, {"id": "8", "text": "", "note": "y"})
    assert load_text(named).documents == ("one", "")
    assert load_text(named).joined == "one\n\n"
    assert load_text(named, column="note").documents == ("x", "y")
    only = rows(tmp_path / "b.jsonl", {"id": "7", "body": "one", "score": 1.5})
    assert load_text(only).documents == ("one",)


def test_missing_columns(tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", {"title": "a", "body": "b"})
    with pytest.raises(DataError, match="no column 'words': its columns are title, body"):
        load_text(path, column="words")
    with pytest.raises(DataError, match="name the column to read, one of title, body"):
        load_text(path)
    with pytest.raises(DataError, match=r"no text in column 'text' of row 2 but 5 \(int\)|row 2 but '5' \(int\)"):
        load_text(rows(tmp_path / "b.jsonl", {"text": "a"}, {"text": 5}))
    with pytest.raises(DataError, match="row 2 but nothing"):
        load_text(rows(tmp_path / "c.jsonl", {"text": "a"}, {"text": None}))
    with pytest.raises(DataError, match="every text in it is blank"):
        load_text(rows(tmp_path / "d.jsonl", {"text": " "}))


def test_unknown_split() -> None:
    with pytest.raises(DataError, match="no split 'train'"):
        load_text("default", split="train")


def test_default_splits_share_nothing() -> None:
    calibration, evaluation = default_documents("calibration"), default_documents("evaluation")
    assert not calibration.keys() & evaluation.keys()
    paragraphs = [
        {" ".join(paragraph.lower().split()) for text in split.values() for paragraph in text.split("\n\n")}
        for split in (calibration, evaluation)
    ]
    assert not paragraphs[0] & paragraphs[1]
    # Nor twelve consecutive words in more than a few places: set phrases, not passages.
    runs = [
        {tuple(words[start : start + 12]) for words in map(str.split, split) for start in range(len(words) - 11)}
        for split in paragraphs
    ]
    assert len(runs[0] & runs[1]) < 0.01 * len(runs[1])


def test_default_is_prose_with_the_stated_split_sizes() -> None:
    sizes = [sum(map(len, default_documents(split).values())) for split in ("calibration", "evaluation")]
    assert sum(sizes) > 200_000
    assert 0.65 < sizes[0] / sum(sizes) < 0.75
    everything = load_text("default").joined + load_text("default", split="calibration").joined
    for noise in ("::=", ">>>", "+----", "====", "****"):
        assert noise not in everything
    # By a hash of the names that no version or platform changes.
    assert {"lambda", "assert", "types"} <= default_documents("calibration").keys()
    assert {"assignment", "compound", "raise"} <= default_documents("evaluation").keys()


def test_default_works_with_every_loader() -> None:
    assert load_data("default") == load_text("default")
    with pytest.raises(DataError, match="plain text"):
        load_data("default", kind="labeled")
