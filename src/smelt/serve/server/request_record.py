"""What the access log and traces have of a request: never a prompt, an answer or a key."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


@dataclass
class RequestRecord:
    """One HTTP request; the fields after `path` are filled in while it is handled."""

    id: str
    client: str
    method: str
    path: str
    wall_time: float = field(default_factory=time.time)
    arrival: float = field(default_factory=time.monotonic)
    key_name: str = ""
    status: int = 499  # as nginx has it, if the client disconnects before it is answered
    duration: float = 0.0
    model: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    queue_time: float | None = None  # to the first step of the engine
    time_to_first_token: float | None = None
    finish_reason: str = ""

    def as_json(self) -> dict[str, object]:
        """Return what the access log has of it."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.wall_time))
        timestamp = f"{seconds}.{int(self.wall_time % 1 * 1000):03d}Z"
        return {
            "time": timestamp, "request_id": self.id, "client": self.client, "key": self.key_name or None,
            "method": self.method, "path": self.path, "status": self.status, "duration": _rounded(self.duration),
            "model": self.model or None, "prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens,
            "queue_time": _rounded(self.queue_time), "time_to_first_token": _rounded(self.time_to_first_token),
            "finish_reason": self.finish_reason or None,
        }  # fmt: skip


# Set by the middleware for the task that handles a request.
_current: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def current_record() -> RequestRecord:
    """Return the record of the request that this task handles; outside of any, one that nobody reads."""
    return _current.get() or RequestRecord("", "", "", "")


def begin_record(record: RequestRecord) -> None:
    _current.set(record)


def new_request_id() -> str:
    return secrets.token_hex(16)


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's X-Request-Id if it is short and plain, otherwise a new one."""
    sent = [value for name, value in headers if name == b"x-request-id"]
    return sent[0].decode() if len(sent) == 1 and _SANE_ID.fullmatch(sent[0]) else new_request_id()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
