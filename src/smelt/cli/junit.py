"""Results of the quality gate as a JUnit XML file, which CI systems display as test cases."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import typer

from smelt.cli.output import RUN
from smelt.errors import SmeltError
from smelt.files import check_writable, write_atomically

# Characters that XML 1.0 cannot hold, even escaped.
_INVALID = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class GateCase:
    """One metric on one data set, with what failed; `verdict` is pass, fail or inconclusive."""

    metric: str
    data: str
    verdict: str
    failures: Sequence[str]
    details: str = ""


def _junit_path(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before any work starts."""
    if path is not None:
        check_writable(path)
        if path.is_dir():
            raise SmeltError(f"{path} is a folder; give --junit a file to write to.")
    return path


JunitOption = Annotated[
    Path | None,
    typer.Option(
        "--junit",
        callback=_junit_path,
        help="Also write the verdicts to this file as JUnit XML, for CI.",
        rich_help_panel=RUN,
    ),
]


def write_junit(path: Path | None, model: str, cases: Sequence[GateCase]) -> None:
    """Write one test case per metric."""
    if path is not None:
        text = junit_xml(model, cases)
        write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def junit_xml(model: str, cases: Sequence[GateCase]) -> str:
    failed = str(sum(bool(case.failures) for case in cases))
    counts = {"tests": str(len(cases)), "failures": failed, "errors": "0", "skipped": "0"}
    suite = ElementTree.Element("testsuite", {"name": _clean(f"smelt eval {model}"), **counts})
    for case in cases:
        names = {"classname": _clean(case.data), "name": _clean(case.metric)}
        element = ElementTree.SubElement(suite, "testcase", names)
        if case.failures:
            message = _clean("; ".join(case.failures))
            ElementTree.SubElement(element, "failure", {"type": case.verdict, "message": message}).text = message
        if case.details:
            ElementTree.SubElement(element, "system-out").text = _clean(case.details)
    suites = ElementTree.Element("testsuites", {"name": "smelt quality gate", **counts})
    suites.append(suite)
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    return _INVALID.sub("�", text)
