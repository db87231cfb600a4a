"""Load text documents for calibration or perplexity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.data.default import SPLITS, default_documents
from smelt.data.files import TEXT_SUFFIXES, Row, column_names, read_rows, read_text, suffix_of, text_column
from smelt.data.hub import is_hub, read_hub
from smelt.data.limits import list_names
from smelt.errors import DataError


@dataclass(frozen=True)
class TextData:
    """Documents in order. `name` is their source."""

    name: str
    documents: tuple[str, ...]

    @property
    def joined(self) -> str:
        """All documents as one text, separated by blank lines."""
        return "\n\n".join(self.documents)


def load_text(source: str | Path, *, column: str | None = None, split: str = "evaluation") -> TextData:
    """Load text from "default", a plain text file (one document), a table's text column, or the hub.

    `split` is "calibration" or "evaluation"; a file has no splits: both give the same text.
    """
    if split not in SPLITS:
        raise DataError(f"There is no split '{split}': expected one of {', '.join(SPLITS)}.")
    if str(source) == "default":
        return TextData(f"default/{split}", tuple(default_documents(split).values()))
    if is_hub(str(source)):
        return text_from_rows(read_hub(str(source), split), str(source), column)
    if suffix_of(Path(source)) in TEXT_SUFFIXES:
        return TextData(str(source), (read_text(Path(source)),))
    return text_from_rows(read_rows(Path(source)), str(source), column)


def text_from_rows(rows: list[Row], source: str, column: str | None) -> TextData:
    """Read one document per row from `column`, the column `text`, or the only column with text."""
    documents = text_column(rows, column or _guess_column(rows, source), source)
    if not any(document.strip() for document in documents):
        raise DataError(f"{source} is empty: every text in it is blank.")
    return TextData(source, documents)


def _guess_column(rows: list[Row], source: str) -> str:
    columns = column_names(rows)
    if "text" in columns:
        return "text"
    text_columns = [name for name in columns if any(_is_text(row.get(name)) for row in rows[:100])]
    if len(text_columns) != 1:
        raise DataError(f"{source} has no column 'text': name the column to read, one of {list_names(columns)}.")
    return text_columns[0]


def _is_text(value: Any) -> bool:
    """Return whether a value is text and not a number in text form, as in CSV."""
    if not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return bool(value.strip())
    return False
