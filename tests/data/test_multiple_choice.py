"""Multiple-choice data in its three formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smelt.data import MultipleChoiceData, load_choices, load_data
from smelt.errors import DataError


def table(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(("question", "answer"), [("query", "gold"), ("question", "answer")])
def test_options_after_one_question(tmp_path: Path, question: str, answer: str) -> None:
    (item,) = load_choices(
        table(tmp_path, {question: "q", "choices": ["a", "b", "c"], answer: 2, "subject": "s"})
    ).items
    assert (item.contexts, item.continuations, item.gold) == (("q", "q", "q"), ("a", "b", "c"), 2)


def test_one_continuation_after_each_context(tmp_path: Path) -> None:
    path = table(tmp_path, {"context_options": ["a", "b"], "continuation": "c", "gold": 1})
    (item,) = load_choices(path).items
    assert (item.contexts, item.continuations, item.gold) == (("a", "b"), ("c", "c"), 1)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"query": "q", "choices": ["a", "b"], "gold": 2}, r"row 1 has 2 in column 'gold'.*0 to 1"),
        ({"query": "q", "choices": ["a", "b"], "gold": None}, r"None in column 'gold'"),
        ({"query": "q", "choices": ["a"], "gold": 0}, r"fewer than two options"),
        ({"query": "q", "choices": "ab", "gold": 0}, r"fewer than two options"),
        ({"query": "q", "choices": ["a", None], "gold": 0}, r"each of the 2 options in column 'choices'"),
        ({"query": ["q", "r", "s"], "choices": ["a", "b"], "gold": 0}, r"each of the 3 options in column 'choices'"),
        ({"query": "q", "gold": 0}, r"expected the columns query, choices, gold; .*it has query, gold"),
    ],
)
def test_broken_rows(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        load_choices(table(tmp_path, row))


@pytest.mark.shared
def test_every_shared_dataset_loads_by_its_columns(shared: Path) -> None:
    sizes = {"copa": 100, "winogrande": 1267, "mmlu_dev": 285, "openbook_qa": 500}
    for name, size in sizes.items():
        data = load_data(shared / f"data/zeroshot/{name}.jsonl.gz")
        assert isinstance(data, MultipleChoiceData) and len(data) == size
