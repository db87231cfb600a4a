"""Load text, labeled and multiple-choice data from files, the hub or the built-in set, and batch it."""

from __future__ import annotations

import warnings
from pathlib import Path

from smelt.data.batches import Batch, labeled_batches, text_batches
from smelt.data.files import TEXT_SUFFIXES, column_names, read_rows, suffix_of
from smelt.data.hub import is_hub, read_hub
from smelt.data.labeled import LabeledData, labeled_from_rows, load_labeled
from smelt.data.multiple_choice import (
    MultipleChoiceData,
    MultipleChoiceItem,
    choices_from_rows,
    has_choices,
    load_choices,
)
from smelt.data.named_datasets import resolve_source
from smelt.data.text import TextData, load_text, text_from_rows
from smelt.errors import DataError

__all__ = [
    "Batch",
    "LabeledData",
    "MultipleChoiceData",
    "MultipleChoiceItem",
    "TextData",
    "labeled_batches",
    "load_choices",
    "load_data",
    "load_labeled",
    "load_text",
    "text_batches",
]

KINDS = ("text", "labeled", "choices")
_OLD_KINDS = {"labelled": "labeled"}  # the spelling before 0.2


def load_data(
    source: str | Path,
    *,
    kind: str | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    split: str = "evaluation",
) -> TextData | LabeledData | MultipleChoiceData:
    """Load data as `kind`, or as its columns suggest: multiple choice, labeled (a label column), else text."""
    source = resolve_source(source, split)
    if kind in _OLD_KINDS:
        message = f"the data kind `{kind}` is now called `{_OLD_KINDS[kind]}`; the old name will stop working."
        warnings.warn(message, FutureWarning, stacklevel=2)
        kind = _OLD_KINDS[kind]
    if kind is not None and kind not in KINDS:
        raise DataError(f"There is no kind of data '{kind}': expected one of {', '.join(KINDS)}.")
    if str(source) == "default" or (suffix_of(Path(source)) in TEXT_SUFFIXES and not is_hub(str(source))):
        if kind not in (None, "text"):
            raise DataError(f"{source} is plain text: it has no rows to read as {kind} data.")
        return load_text(source, column=text, split=split)
    rows = read_hub(str(source), split) if is_hub(str(source)) else read_rows(Path(source))
    kind = kind or _guess_kind(column_names(rows), label)
    if kind == "choices":
        return choices_from_rows(rows, str(source))
    if kind == "labeled":
        return labeled_from_rows(rows, str(source), text=text, pair=pair, label=label or "label")
    return text_from_rows(rows, str(source), text)


def _guess_kind(columns: list[str], label: str | None) -> str:
    if label is None and has_choices(columns):
        return "choices"
    return "labeled" if label is not None or "label" in columns else "text"
