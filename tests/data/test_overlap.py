"""Overlap of evaluation and calibration data."""

from __future__ import annotations

import numpy as np

from smelt.compression.recipe.inputs import overlap_warning
from smelt.data import LabeledData, MultipleChoiceData, MultipleChoiceItem, TextData, load_data
from smelt.data.overlap import NGRAM, overlap


def words(count: int, seed: int) -> list[str]:
    return [f"word{number}" for number in np.random.default_rng(seed).integers(0, 10**6, count)]


def text(*documents: list[str]) -> TextData:
    return TextData("text", tuple(" ".join(document) for document in documents))


def rows(*sentences: str, second: tuple[str, ...] | None = None) -> LabeledData:
    return LabeledData("rows", sentences, second, np.zeros(len(sentences), np.int64), False)


def test_the_shared_part_of_a_text() -> None:
    shared, own, other = words(500, 0), words(500, 1), words(2000, 2)
    found = overlap(text(shared + own), text(other[:1000] + shared + other[1000:]))
    assert found == (500 - NGRAM + 1) / (1000 - NGRAM + 1)
    assert overlap(text(own), text(shared)) == 0 and overlap(text(own), text(own)) == 1


def test_line_breaks_and_case_do_not_matter_but_order_does() -> None:
    document = words(100, 0)
    broken = TextData("text", ("\n  ".join(document).upper(),))
    assert overlap(text(document), broken) == 1 and overlap(text(document), text(document[::-1])) == 0


def test_ngrams_do_not_cross_documents() -> None:
    document = words(2 * NGRAM, 0)
    assert overlap(text(document), text(document[:NGRAM], document[NGRAM:])) == 2 / (NGRAM + 1)


def test_short_rows_count_as_a_whole() -> None:
    assert overlap(rows("good film", "bad film"), rows("Good  film", "a good film")) == 0.5
    assert overlap(rows("a", "b", second=("c", "d")), rows("a", "b", second=("d", "d"))) == 0.5
    item = MultipleChoiceItem(("the sky is", "the sky is"), ("green", "blue"), 1)
    assert overlap(MultipleChoiceData("items", (item,)), TextData("text", ("the sky is blue",))) == 1
    assert overlap(TextData("empty", (" ",)), TextData("text", ("the sky is blue",))) == 0


def test_the_splits_of_the_built_in_text_are_not_warned_of() -> None:
    calibration, evaluation = (load_data("default", split=part) for part in ("calibration", "evaluation"))
    assert overlap_warning(calibration, evaluation) is None and overlap_warning(calibration, None) is None
    assert "100 % of the evaluation data" in str(overlap_warning(calibration, calibration))
