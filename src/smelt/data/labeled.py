"""Load labeled data: single sentences or pairs, each with a class or a number, as in GLUE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from smelt.data.files import Row, column_names, column_values, read_rows, text_column
from smelt.data.hub import is_hub, read_hub
from smelt.data.limits import list_names
from smelt.errors import DataError

# First and second text column of GLUE-style files; the first match is used.
_GLUE_COLUMNS = (("sentence1", "sentence2"), ("question", "sentence"), ("sentence", None), ("text", None))
_MAX_CLASSES = 2**31


@dataclass(frozen=True, eq=False)
class LabeledData:
    """Labeled items. `classes` are the class names in label order, if the file has names instead of numbers."""

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...] | None
    labels: np.ndarray  # [items], int64 for classes and float32 for regression
    regression: bool
    classes: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.first)

    def take(self, indices: Sequence[int] | np.ndarray) -> LabeledData:
        """Return the items at these indices, in this order."""
        first = tuple(self.first[index] for index in indices)
        second = None if self.second is None else tuple(self.second[index] for index in indices)
        return replace(self, first=first, second=second, labels=self.labels[np.asarray(indices, dtype=np.int64)])


def load_labeled(
    source: str | Path,
    *,
    text: str | None = None,
    pair: str | None = None,
    label: str = "label",
    split: str = "evaluation",
) -> LabeledData:
    """Load labeled items from a table; by default from GLUE columns: sentence, sentence1 + sentence2, or text."""
    rows = read_hub(str(source), split) if is_hub(str(source)) else read_rows(Path(source))
    return labeled_from_rows(rows, str(source), text=text, pair=pair, label=label)


def labeled_from_rows(
    rows: list[Row], source: str, *, text: str | None = None, pair: str | None = None, label: str = "label"
) -> LabeledData:
    """Convert rows to labeled items."""
    if text is None and pair is None:
        text, pair = _guess_columns(column_names(rows), source)
    elif text is None:
        raise DataError(f"{source} has a second text column '{pair}' but no first one: name both.")
    values = column_values(rows, label, source)
    labels, classes = as_labels(values, f"{source}, column '{label}'")
    first = text_column(rows, text, source)
    second = None if pair is None else text_column(rows, pair, source)
    if not any(words.strip() for words in first + (second or ())):
        raise DataError(f"{source} is empty: every text in it is blank.")
    return LabeledData(source, first, second, labels, labels.dtype == np.float32, classes)


def _guess_columns(columns: list[str], source: str) -> tuple[str, str | None]:
    for first, second in _GLUE_COLUMNS:
        if first in columns and (second is None or second in columns):
            return first, second
    raise DataError(f"{source} has no column 'sentence' or 'text': name the text column, one of {list_names(columns)}.")


def as_labels(values: list[Any], where: str) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Convert labels: integers and sorted strings to classes, other numbers to regression targets."""
    for number, value in enumerate(values, start=1):
        if value is None or (isinstance(value, str) and not value.strip()):
            raise DataError(f"{where} has no label in row {number}: remove the row or give it a label.")
    numbers = _as_numbers(values)
    if numbers is None:
        words = [str(value).strip() for value in values]
        classes = tuple(sorted(set(words)))
        index = {word: number for number, word in enumerate(classes)}
        return np.array([index[word] for word in words], dtype=np.int64), classes
    if not np.isfinite(numbers).all():
        raise DataError(
            f"{where} has a label that is not a finite number in row {int(np.argmin(np.isfinite(numbers))) + 1}."
        )
    if (numbers != np.round(numbers)).any():
        return numbers.astype(np.float32), None
    if numbers.min() < 0:
        raise DataError(f"{where} has negative labels, which mark unlabeled rows: give a labeled split.")
    if numbers.max() >= _MAX_CLASSES:
        raise DataError(f"{where} has the class {numbers.max():.6g}; classes are numbered from 0 to {_MAX_CLASSES:,}.")
    return numbers.astype(np.int64), None


def _as_numbers(values: list[Any]) -> np.ndarray | None:
    try:
        return np.array([float(value) for value in values], dtype=np.float64)
    except (TypeError, ValueError, OverflowError):  # an integer may exceed the range of floats
        return None
