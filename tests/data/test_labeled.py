"""Labeled rows: columns by name or convention, labels as classes or numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smelt.data import LabeledData, load_data, load_labeled
from smelt.errors import DataError


def table(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    ("columns", "pair"),
    [(("sentence",), None), (("text",), None), (("sentence1", "sentence2"), "b"), (("question", "sentence"), "b")],
)
def test_conventional_columns(tmp_path: Path, columns: tuple[str, ...], pair: str | None) -> None:
    data = load_labeled(table(tmp_path, {**dict(zip(columns, "ab", strict=False)), "label": 1}))
    assert (data.first, data.second) == (("a",), (pair,) if pair else None)


def test_named_columns(tmp_path: Path) -> None:
    path = table(tmp_path, {"x": "a", "y": "b", "class": 2}, {"x": "c", "y": "d", "class": 0})
    data = load_labeled(path, text="x", pair="y", label="class")
    assert (data.first, data.second, data.labels.tolist()) == (("a", "c"), ("b", "d"), [2, 0])
    assert data.labels.dtype == np.int64 and not data.regression
    swapped = data.take([1, 0, 1])
    assert (swapped.first, swapped.second, swapped.labels.tolist()) == (("c", "a", "c"), ("d", "b", "d"), [0, 2, 0])


def test_fractional_labels_are_regression(tmp_path: Path) -> None:
    data = load_labeled(table(tmp_path, {"text": "a", "label": 5.0}, {"text": "b", "label": 4.75}))
    assert data.regression and data.labels.dtype == np.float32 and data.labels.tolist() == [5.0, 4.75]
    whole = load_labeled(table(tmp_path, {"text": "a", "label": 1.0}, {"text": "b", "label": 0.0}))
    assert not whole.regression and whole.labels.tolist() == [1, 0]


def test_string_labels_become_classes_in_sorted_order(tmp_path: Path) -> None:
    data = load_labeled(table(tmp_path, *({"text": "a", "label": word} for word in ("no", "maybe", "yes", "no"))))
    assert data.classes == ("maybe", "no", "yes") and data.labels.tolist() == [1, 0, 2, 1]


def test_csv_labels_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("sentence,label\na,1\nb,0\n")
    data = load_labeled(path)
    assert data.labels.tolist() == [1, 0] and data.classes is None


def test_bad_labels(tmp_path: Path) -> None:
    cases = {
        "no column 'label': its columns are text": [{"text": "a"}],
        "no label in row 2": [{"text": "a", "label": 1}, {"text": "b", "label": None}],
        "no label in row 1": [{"text": "a", "label": " "}],
        "negative labels": [{"text": "a", "label": -1}],
        "not a finite number in row 2": [{"text": "a", "label": 1}, {"text": "b", "label": float("nan")}],
        "name the text column, one of words, label": [{"words": "a", "label": 1}],
    }
    for sentence, rows in cases.items():
        with pytest.raises(DataError, match=sentence):
            load_labeled(table(tmp_path, *rows))
    with pytest.raises(DataError, match="name both"):
        load_labeled(table(tmp_path, {"a": "x", "label": 1}), pair="a")


def test_the_data_type_follows_from_the_columns(tmp_path: Path) -> None:
    labeled = load_data(table(tmp_path, {"sentence": "a", "label": 1}))
    assert isinstance(labeled, LabeledData)
    other = load_data(table(tmp_path, {"text": "a", "stars": 1}), label="stars")
    assert isinstance(other, LabeledData) and other.labels.tolist() == [1]
    assert not isinstance(load_data(table(tmp_path, {"text": "a", "label": 1}), kind="text"), LabeledData)
    with pytest.raises(DataError, match="no kind of data 'video'"):
        load_data(table(tmp_path, {"text": "a"}), kind="video")


@pytest.mark.shared
def test_glue_files(shared: Path) -> None:
    sst2 = load_labeled(shared / "data/glue/sst2/dev.jsonl.gz")
    assert len(sst2) == 872 and sst2.second is None and set(sst2.labels.tolist()) == {0, 1}
    stsb = load_labeled(shared / "data/glue/stsb/dev.jsonl.gz")
    assert len(stsb) == 1500 and stsb.second is not None and stsb.regression


def test_the_old_spelling_of_the_data_type_still_works(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"sentence": "a", "label": 1}\n{"sentence": "b", "label": 0}\n')
    with pytest.warns(FutureWarning, match="now called `labeled`"):
        data = load_data(file, kind="labelled")
    assert isinstance(data, LabeledData) and len(data) == 2
