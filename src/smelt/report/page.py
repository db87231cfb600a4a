"""The compression report: one self-contained HTML file from a plain dict, without scripts or network access."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smelt.report import sections
from smelt.report.integer import integer_graph
from smelt.report.layers import precision, undercalibrated_experts
from smelt.report.markup import Markup, join, tag
from smelt.report.quality import quality
from smelt.report.rows import opens_in_sentence, short_path
from smelt.report.speed import speed
from smelt.report.steps import steps, training
from smelt.report.style import CSS
from smelt.report.summary import figures, verdict

# Even if a text of the run became markup, the browser would neither execute nor fetch anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(run: Mapping[str, Any]) -> str:
    """Render the page. `title` and `model` are required; any other missing part of the run is left out."""
    return page(
        str(run["title"]),
        _header(run),
        sections.warnings(run),
        figures(run),
        sections.comparison_table(run),
        quality(run),
        sections.samples(run),
        speed(run),
        sections.kept(run),
        precision(run),
        integer_graph(run),
        undercalibrated_experts(run),
        steps(run),
        training(run),
        sections.recipe(run),
        sections.passport(run),
        sections.machine(run),
        sections.papers(run),
        tag("footer", "Written by Smelt."),
    )


def page(title: str, *content: object) -> str:
    """Wrap content in a complete page."""
    body = tag("body", tag("main", *content))
    return "<!doctype html>\n" + tag("html", _head(title), body, lang="en") + "\n"


def write_report(run: Mapping[str, Any], path: Path) -> None:
    """Render a run and write its page."""
    write_page(render(run), path)


def write_page(text: str, path: Path) -> None:
    """Write a page atomically."""
    # A lone surrogate in generated text must not cost the report.
    content = text.encode("utf-8", errors="replace")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _head(title: str) -> Markup:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", title),
        tag("style", Markup(CSS)),
    )


def _header(run: Mapping[str, Any]) -> Markup:
    model = short_path(str(run["model"]))
    source = f"{model} → {run['result']}" if run.get("result") else model
    line = ", ".join(str(part) for part in (source, run.get("created")) if part)
    sentence = verdict(run)
    opens_in = opens_in_sentence(run)
    return tag(
        "header",
        tag("h1", run["title"]),
        tag("div", line, class_="soft"),
        tag("p", sentence, class_="verdict") if sentence else join(),
        tag("div", opens_in, class_="soft") if opens_in else None,
    )
