"""No client stops another: while costly requests arrive, a stream goes on and /health answers.

The bounds are wide, since machines that run tests are busy: without threads and caches, these requests took seconds.
`benchmarks/serve/stall.py` measures a real model.
"""

from __future__ import annotations

import pytest

from tests.serve.server_process import Server
from tests.serve.stalls import ATTACKS, measure

MAX_GAP = 1.5  # seconds


@pytest.mark.parametrize("attack", ["prompts", "chats", "schemas", "expressions"])
def test_a_bystander_goes_on(server: Server, attack: str) -> None:
    if attack in ("schemas", "expressions"):
        pytest.importorskip("llguidance")
    gaps = measure(server.url, ATTACKS[attack])
    assert all(status < 500 for status in gaps.statuses)
    assert gaps.token < MAX_GAP and gaps.health < MAX_GAP, gaps
    server.wait_until_idle()
