"""Simple sections of the page. Each takes the run and returns None if the run has nothing for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from smelt.report import numbers
from smelt.report.layers import kept_map
from smelt.report.markup import Markup, join, section, table, tag, warning
from smelt.report.rows import Run, before_after

_ARXIV = re.compile(r"arxiv[ :]*(\d{4}\.\d{4,5})", re.IGNORECASE)
_SIZE_FACTS = {"memory_bytes": "memory", "gpu_memory_bytes": "gpu memory"}


def warnings(run: Run) -> Markup | None:
    """List the warnings of the run."""
    texts = run.get("warnings") or []
    return join(*(warning(str(text)) for text in texts)) if texts else None


def comparison_table(run: Run) -> Markup | None:
    rows = [(row.label, row.before, row.after, row.change) for row in before_after(run)]
    return section("Before and after", table(("", "before", "after", "change"), rows)) if rows else None


def kept(run: Run) -> Markup | None:
    """Draw the heat map of kept units with its legend."""
    blocks = run.get("kept") or []
    if not blocks:
        return None
    key = tag("p", tag("span", class_="key"), "kept", tag("span", class_="key hollow"), "removed", class_="soft")
    return section("What was kept", key, kept_map(blocks))


def steps(run: Run) -> Markup | None:
    """List the time, memory and effect of every step."""
    listed = run.get("steps") or []
    if not listed:
        return None
    total = sum(step.get("seconds") or 0.0 for step in listed)
    foot = ("all steps", numbers.seconds(total), "", "", "", "") if len(listed) > 1 else ()
    headings = ("step", "time", "peak memory", "tensors changed", "parameters removed", "")
    return section("Steps", table(headings, (_step(step) for step in listed), foot))


def _step(step: Run) -> tuple[object, ...]:
    changed = step.get("changed") or {}
    facts = ", ".join(f"{key} {numbers.plain(value)}" for key, value in (step.get("facts") or {}).items())
    facts = ", ".join(text for text in (_step_quality(step.get("quality") or {}), facts) if text)
    return (
        step.get("name", ""),
        _format_optional(step.get("seconds"), numbers.seconds),
        _format_optional(step.get("peak_bytes"), numbers.size),
        _format_optional(changed.get("tensors"), numbers.plain),
        _format_optional(changed.get("parameters_removed"), numbers.count),
        tag("div", facts, class_="facts") if facts else "",
    )


def _step_quality(quality: Run) -> str:
    """Format the quality after a step and what the step cost, which is measured if the quality gate fails."""
    if not quality:
        return ""
    unit = "%" if quality.get("relative") else "pt"
    return f"{quality['metric']} {numbers.metric(quality['value'])} after it (drop {100 * quality['drop']:+.3g}{unit})"


def _format_optional(value: float | None, write: Callable[[float], str]) -> str:
    return "" if value is None else write(value)


def samples(run: Run) -> Markup | None:
    """Show each prompt completed by both models, side by side."""
    counts: Counter[str] = Counter()
    turns: list[tuple[int, Run]] = []
    for sample in run.get("samples") or []:
        who = str(sample.get("who", ""))
        turns.append((counts[who], sample))
        counts[who] += 1
    quotes = [
        tag(
            "blockquote",
            tag("span", sample.get("who", ""), class_="who"),
            tag("p", tag("span", sample.get("prompt", ""), class_="soft"), sample.get("text", "")),
        )
        for _, sample in sorted(turns, key=lambda turn: turn[0])
    ]
    return section("Sample completions", tag("div", *quotes, class_="samples")) if quotes else None


def recipe(run: Run) -> Markup | None:
    return section("Recipe", tag("pre", run["recipe"])) if run.get("recipe") else None


def passport(run: Run) -> Markup | None:
    """Show where the model came from and the hashes of its files; `smelt verify` checks them."""
    facts = run.get("passport") or {}
    if not facts:
        return None
    source = facts.get("source") or {}
    pairs = [("source model", source.get("name")), ("sha256 of its files", source.get("sha256"))]
    pairs += [("its license", source.get("license"))]
    for part, data in (facts.get("data") or {}).items():
        if data:
            pairs += [(f"{part} data", f"{data.get('name')}, {data.get('items')} items, sha256 {data.get('sha256')}")]
    pairs += [("sha256 of all files below", facts.get("fingerprint"))]
    rows = [
        (name, numbers.size(file["bytes"]), tag("code", file["sha256"]))
        for name, file in (facts.get("files") or {}).items()
    ]
    origin = tag("dl", *(join(tag("dt", label), tag("dd", text or "not stated")) for label, text in pairs))
    return section("Passport", origin, table(("file", "size", "sha256"), rows))


def machine(run: Run) -> Markup | None:
    """List hardware and versions."""
    pairs = [
        join(tag("dt", label), tag("dd", words)) for label, words in map(_fact, (run.get("machine") or {}).items())
    ]
    return section("Measured on", tag("dl", *pairs)) if pairs else None


def _fact(item: tuple[str, object]) -> tuple[str, str]:
    key, value = item
    if key in _SIZE_FACTS and isinstance(value, int):
        return _SIZE_FACTS[key], numbers.size(value)
    return key, numbers.plain(value)


def papers(run: Run) -> Markup | None:
    """List the papers behind the methods; an arXiv number becomes a link."""
    entries = run.get("papers") or []
    items = [tag("li", paper.get("method", ""), ": ", _linked(str(paper.get("citation", "")))) for paper in entries]
    return section("Papers", tag("ul", *items)) if items else None


def _linked(citation: str) -> Markup:
    match = _ARXIV.search(citation)
    if not match:
        return join(citation)
    link = tag("a", match.group(0), href=f"https://arxiv.org/abs/{match.group(1)}", rel="noreferrer")
    return join(citation[: match.start()], link, citation[match.end() :])
