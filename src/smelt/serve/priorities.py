"""Priorities of threads: work that must not delay the engine's steps or the event loop."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

NICENESS = 10


def yield_to_others() -> None:
    """Lower the priority of the calling thread: others run first where cores are few."""
    if sys.platform == "linux":  # elsewhere threads have no niceness of their own
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
