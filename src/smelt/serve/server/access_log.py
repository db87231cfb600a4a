"""The access log: one line of JSON for each request, written by a thread, so that a slow disk delays no answer."""

from __future__ import annotations

import json
import logging
import queue
import sys
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from pathlib import Path

from smelt.errors import SmeltError
from smelt.serve.server.request_record import RequestRecord

MAX_PENDING = 10_000  # lines; more are dropped, since nobody seems to read them


class _DroppingQueueHandler(QueueHandler):
    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            super().enqueue(record)
        except queue.Full:
            return


class AccessLog:
    """Appends to a file, which may be moved away at any time to rotate it; `-` is standard output. Close it."""

    def __init__(self, target: str) -> None:
        try:
            file = logging.StreamHandler(sys.stdout) if target == "-" else WatchedFileHandler(target, encoding="utf-8")
        except OSError as error:
            raise SmeltError(f"the access log {target} cannot be written ({error.strerror}).") from error
        file.setFormatter(logging.Formatter("%(message)s"))
        lines: queue.Queue[logging.LogRecord] = queue.Queue(MAX_PENDING)
        self._handler = _DroppingQueueHandler(lines)
        self._listener = QueueListener(lines, file)
        self._file = file
        self._listener.start()

    def write(self, record: RequestRecord) -> None:
        line = json.dumps(record.as_json(), separators=(",", ":"))
        self._handler.emit(logging.LogRecord("access", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        self._listener.stop()
        self._file.close()


def check_access_log(target: str) -> None:
    """Refuse a file that cannot be written, before the model is loaded."""
    folder = Path(target).parent
    if target != "-" and (not folder.is_dir() or Path(target).is_dir()):
        raise SmeltError(f"--access-log {target} is not a file in an existing folder; `-` is standard output.")
