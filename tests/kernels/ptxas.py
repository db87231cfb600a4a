"""What ptxas reports about a kernel: spilled registers, and matrix instructions that it could not overlap."""

from __future__ import annotations

import re

# Warnings that wgmma instructions wait for one another: C7510, C7513, C7514 and their like.
_SERIALIZED = re.compile(r"C75\d\d|wgmma.*serializ|serializ.*wgmma", re.IGNORECASE)
_SPILLED = re.compile(r"(\d+) bytes spill")


def problems(report: str, allowed_bytes: int = 0) -> list[str]:
    """Return the lines of a report that cost speed; spills of a few bytes may be allowed."""
    assert "registers" in report, f"this is no report of ptxas: {report}"
    return [line for line in report.splitlines() if _SERIALIZED.search(line) or _spilled(line) > allowed_bytes]


def _spilled(line: str) -> int:
    return max(map(int, _SPILLED.findall(line)), default=0)
