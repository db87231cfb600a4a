"""The before-and-after table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from smelt.report.layers import undercalibrated_sentence
from smelt.report.rows import before_after, opens_in_sentence
from smelt.report.speed import engine_sentence


def summary_table(run: Mapping[str, Any]) -> Table:
    """Build the table of quality, size and speed before and after; the caption says what computed the layers, and names
    undercalibrated experts."""
    sentences = [
        sentence
        for sentence in (engine_sentence(run), undercalibrated_sentence(run), opens_in_sentence(run))
        if sentence
    ]
    caption = Text("\n".join(sentences)) if sentences else None
    table = Table(title=Text(str(run["title"])), title_justify="left", caption=caption, caption_justify="left")
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for row in before_after(run):
        table.add_row(*(Text(cell) for cell in (row.label, row.before, row.after, row.change)))
    return table


def sample_lines(run: Mapping[str, Any]) -> list[str]:
    """Return a line for each sample completion, and one for each item whose prediction changed."""
    completions = [
        f"{sample['who']}: {sample['prompt']} … {' '.join(sample['text'].split())}"
        for sample in run.get("samples") or []
    ]
    changed = [
        f"{item['before']} → {item['after']} (label {item['label']}): {' '.join(item['text'].split())}"
        for item in run.get("predictions") or []
        if item["before"] != item["after"]
    ]
    return completions + changed
