"""Experts that the calibration data did not show enough of: named on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smelt.report import numbers
from smelt.report.elements import note, section, table
from smelt.report.markup import Markup
from smelt.report.rows import Run

SHOWN = 8  # in the terminal
_EXPLAINED = (
    "Fewer tokens of the calibration data reached these experts than their widest layer has inputs, so that what was "
    "seen does not settle how they are best rounded; one that no token reached was rounded without data. More "
    "calibration data helps."
)


def few_tokens(run: Run) -> Markup | None:
    """All of them, each with its tokens."""
    experts = run.get("few_tokens") or []
    if not experts:
        return None
    rows = [(expert["expert"], _tokens(expert), numbers.plain(expert["inputs"])) for expert in experts]
    return section("Experts that saw few tokens", note(_EXPLAINED), table(("expert", "tokens", "inputs"), rows))


def few_words(run: Run) -> str:
    """One sentence with the first of them; empty where there are none."""
    experts = run.get("few_tokens") or []
    if not experts:
        return ""
    named = [f"{expert['expert']} ({_tokens(expert)})" for expert in experts[:SHOWN]]
    more = f" and {len(experts) - SHOWN} more, which the report names" if len(experts) > SHOWN else ""
    return f"experts that fewer tokens reached than they have inputs: {', '.join(named)}{more}"


def _tokens(expert: Mapping[str, Any]) -> str:
    return numbers.plain(expert["tokens"]) if expert["tokens"] else "never reached"
