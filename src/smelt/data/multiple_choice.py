"""Load multiple-choice data: for each option of an item, a context and a scored continuation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.data.files import Row, column_names, read_rows
from smelt.data.hub import is_hub, read_hub
from smelt.data.limits import list_names
from smelt.errors import DataError


@dataclass(frozen=True)
class MultipleChoiceItem:
    """One item: option i is `continuations[i]` after `contexts[i]`; `gold` is the index of the correct one."""

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class MultipleChoiceData:
    """Items in order. `name` is their source."""

    name: str
    items: tuple[MultipleChoiceItem, ...]

    def __len__(self) -> int:
        return len(self.items)


def load_choices(source: str | Path, *, split: str = "evaluation") -> MultipleChoiceData:
    """Load multiple-choice items from a table with one of three sets of columns:

    `query`, `choices`, `gold`; `question`, `choices`, `answer` (MMLU); or `context_options`, `continuation`, `gold`
    (WinoGrande: the same continuation is scored after each context).
    """
    rows = read_hub(str(source), split) if is_hub(str(source)) else read_rows(Path(source))
    return choices_from_rows(rows, str(source))


def has_choices(columns: list[str]) -> bool:
    """Return whether rows with these columns are multiple choice."""
    return any(set(layout) <= set(columns) for layout in _LAYOUTS)


def choices_from_rows(rows: list[Row], source: str) -> MultipleChoiceData:
    """Convert rows to multiple-choice items."""
    columns = column_names(rows)
    layout = next((layout for layout in _LAYOUTS if set(layout) <= set(columns)), None)
    if layout is None:
        expected = "; ".join(", ".join(names) for names in _LAYOUTS)
        raise DataError(
            f"{source} is not multiple choice: expected the columns {expected}; it has {list_names(columns)}."
        )
    return MultipleChoiceData(
        source, tuple(_item(row, layout, f"{source} row {n}") for n, row in enumerate(rows, start=1))
    )


_LAYOUTS = (
    ("query", "choices", "gold"),
    ("question", "choices", "answer"),
    ("context_options", "continuation", "gold"),
)


def _item(row: Row, layout: tuple[str, str, str], where: str) -> MultipleChoiceItem:
    context, scored, gold = (row.get(name) for name in layout)
    options = max(len(value) if isinstance(value, list) else 0 for value in (context, scored))
    if options < 2:
        raise DataError(f"{where} has fewer than two options.")
    if isinstance(gold, bool) or not isinstance(gold, int) or not 0 <= gold < options:
        raise DataError(
            f"{where} has {gold!r:.40} in column '{layout[2]}': expected the index of an option, 0 to {options - 1}."
        )
    return MultipleChoiceItem(
        _as_texts(context, options, layout[0], where), _as_texts(scored, options, layout[1], where), gold
    )


def _as_texts(value: Any, options: int, column: str, where: str) -> tuple[str, ...]:
    """Return one text per option: a list has one each, a single text is used for all."""
    texts = value if isinstance(value, list) else [value] * options
    if len(texts) != options or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(f"{where} does not have a text for each of the {options} options in column '{column}'.")
    return tuple(texts)
