"""A fake engine process: it starts quickly and runs a script supplied by the test."""

from __future__ import annotations

import sys

_BEGINNING = """
import socket, sys, time
from smelt.serve.worker.messages import *
pipe = Pipe(socket.socket(fileno=int(sys.argv[1])))
start = pipe.receive()
state = dict.fromkeys(("running", "waiting", "blocks_used", "steps", "computed_tokens", "preemptions", "prompt_tokens",
                       "cached_tokens", "generated_tokens"), 0) | {"blocks": 8}
ready = lambda: pipe.send(EngineReady(folder=start.model, max_model_len=64, max_request_tokens=64, vocab_size=257,
                                      backend="none", blocks=8, block_size=16, state=state))
"""


def fake_engine_command(script: str) -> tuple[str, ...]:
    """Return the command that runs this script, in which `pipe`, `start`, `state` and `ready()` are defined."""
    return (sys.executable, "-c", _BEGINNING + script)
