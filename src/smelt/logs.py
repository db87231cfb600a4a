"""Show the log lines of Smelt in a process that is Smelt's own: a command, the engine of a server, a training rank.

Library code logs to `logging.getLogger(__name__)` and sets nothing up; in any other process that is up to its program.
"""

from __future__ import annotations

import logging
import os
import sys

from smelt.errors import ConfigError

LEVEL_VARIABLE = "SMELT_LOG_LEVEL"  # subprocesses inherit it
LEVELS = ("debug", "info", "warning", "error")


def show_logs(prefix: str = "  ") -> None:
    """Write the lines of all `smelt` loggers to standard error, from the level on that the environment sets."""
    level = os.environ.get(LEVEL_VARIABLE, "").lower() or "info"
    if level not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE} is {level!r:.40}; use one of {', '.join(LEVELS)}.")
    logger = logging.getLogger("smelt")
    logger.handlers = [_StderrHandler(prefix)]
    logger.setLevel(level.upper())


class _StderrHandler(logging.Handler):
    """Writes to what standard error is at that moment, and says where a debug line comes from."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        origin = f"{record.name}: " if record.levelno <= logging.DEBUG else ""
        print(f"{self.prefix}{origin}{self.format(record)}", file=sys.stderr, flush=True)
