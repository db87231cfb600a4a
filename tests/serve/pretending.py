"""A process that stands for the engine's: it starts in no time, and says and does what a test wants."""

from __future__ import annotations

import sys

_BEGINNING = """
import sys, time
from smelt.serve.worker.pipe import Pipe
pipe = Pipe(int(sys.argv[1]))
send = lambda **message: pipe.send(message)
options = pipe.receive()
state = dict.fromkeys(("running", "waiting", "blocks_used", "steps", "computed_tokens", "preemptions", "prompt_tokens",
                       "cached_tokens", "generated_tokens"), 0) | {"blocks": 8}
ready = lambda: send(kind="ready", folder=options["model"], context=64, longest=64, vocabulary=257, blocks=8, block=16,
                     path="none", state=state)
"""


def pretending(script: str) -> tuple[str, ...]:
    """The command that runs this script; in it are `pipe`, `send`, `options` and `ready()`."""
    return (sys.executable, "-c", _BEGINNING + script)
