"""Simple sections of the page. Each takes the run and returns None if the run has nothing for it."""

from __future__ import annotations

import re
from collections import Counter

from smelt.report import numbers
from smelt.report.charts import pair_of_bars
from smelt.report.layers import kept_map
from smelt.report.markup import Markup, details, join, section, table, tag, warning
from smelt.report.rows import ComparisonRow, Run, before_after

_ARXIV = re.compile(r"arxiv[ :]*(\d{4}\.\d{4,5})", re.IGNORECASE)
_MACHINE = {
    "cpu": "CPU", "cores": "cores", "memory_bytes": "memory", "gpu": "GPU", "gpu_memory_bytes": "GPU memory",
    "os": "operating system", "python": "Python", "torch": "PyTorch", "smelt": "Smelt",
}  # fmt: skip


def warnings(run: Run) -> Markup | None:
    """List the warnings of the run."""
    texts = run.get("warnings") or []
    return join(*(warning(str(text)) for text in texts)) if texts else None


def comparison_table(run: Run) -> Markup | None:
    """List what changed, with a bar for each quantity before and after; the longer of the two fills the column."""
    rows = [(row.label, _bars(row), row.before, row.after, row.change) for row in before_after(run)]
    if not rows:
        return None
    key = tag("p", tag("span", class_="key grey"), "before", tag("span", class_="key second"), "after", class_="soft")
    return section("Before and after", key, table(("", "", "before", "after", "change"), rows))


def _bars(row: ComparisonRow) -> Markup | str:
    return "" if row.values is None else tag("div", pair_of_bars(*row.values, title=row.label), class_="bars")


def kept(run: Run) -> Markup | None:
    """Draw the heat map of kept units with its legend."""
    blocks = run.get("kept") or []
    if not blocks:
        return None
    key = tag("p", tag("span", class_="key"), "kept", tag("span", class_="key hollow"), "removed", class_="soft")
    return section("What was kept", key, kept_map(blocks))


def samples(run: Run) -> Markup | None:
    """Show each prompt completed by both models, side by side, or the predictions for some items."""
    if run.get("predictions"):
        return _predictions(run["predictions"])
    counts: Counter[str] = Counter()
    turns: list[tuple[int, Run]] = []
    for sample in run.get("samples") or []:
        who = str(sample.get("who", ""))
        turns.append((counts[who], sample))
        counts[who] += 1
    quotes = [quote(str(sample.get("who", "")), sample) for _, sample in sorted(turns, key=lambda turn: turn[0])]
    return section("Sample completions", tag("div", *quotes, class_="samples")) if quotes else None


def quote(who: str, sample: Run) -> Markup:
    """Show a prompt and its completion."""
    text = tag("p", tag("span", sample.get("prompt", ""), class_="soft"), sample.get("text", ""))
    return tag("blockquote", tag("span", who, class_="who"), text)


def _predictions(items: list[Run]) -> Markup:
    keys = ("text", "label", "before", "after")
    rows = [
        [tag("div", item["text"], class_="item"), *(numbers.plain(item[key]) for key in keys[1:])] for item in items
    ]
    return section("Sample predictions", table(keys, rows))


def recipe(run: Run) -> Markup | None:
    return section("Recipe", details("Show the recipe", tag("pre", run["recipe"]))) if run.get("recipe") else None


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
    files = details("Show the files and their hashes", table(("file", "size", "sha256"), rows)) if rows else None
    return section("Passport", origin, files)


def machine(run: Run, heading: str = "Measured on") -> Markup | None:
    """List hardware and versions."""
    pairs = [
        join(tag("dt", label), tag("dd", words)) for label, words in map(_fact, (run.get("machine") or {}).items())
    ]
    return section(heading, tag("dl", *pairs)) if pairs else None


def _fact(item: tuple[str, object]) -> tuple[str, str]:
    key, value = item
    label = _MACHINE.get(key, key.replace("_", " "))
    return label, numbers.size(value) if key.endswith("_bytes") and isinstance(value, int) else numbers.plain(value)


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
