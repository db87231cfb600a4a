"""A short soak: nothing is left of clients that leave or are killed, of adapters, and of an engine that was killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
def test_nothing_leaks_in_half_a_minute(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    from benchmarks.serve.soak import failures, parse, run, summarize

    options = parse(["--minutes", "0.5", "--clients", "12", "--kill-every", "8", "--pauses", "2"])
    soak = run(options, tmp_path)
    assert failures(soak, summarize(soak)) == []
    assert len(soak.kills) == 1 and soak.samples[-1]["generated_tokens"] > 0
