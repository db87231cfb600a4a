"""Run a file of requests in OpenAI's batch format through the server's own routes, without a socket.

The output is written when all requests have been answered. Until then the answers are in `OUTPUT.partial`, one complete
line each; a run that was interrupted goes on from there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from starlette.types import ASGIApp, Message

from smelt.errors import SmeltError
from smelt.files import write_atomically
from smelt.serve.server.app import create_app
from smelt.serve.server.request_record import new_request_id
from smelt.serve.server.service import Service
from smelt.serve.server.settings import ServerSettings

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/rerank", "/v1/score",
    "/score", "/classify",
)  # fmt: skip
RETRIED = (429, 500, 503)  # the engine was busy or died
ATTEMPTS, RETRY_SECONDS = 4, 5.0


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass
class BatchResult:
    requests: int
    resumed: int  # answered by an earlier run
    failed: int  # answered with an error


def read_batch(path: Path) -> list[BatchRequest]:
    """Read and check all requests, before a model is loaded."""
    requests: dict[str, BatchRequest] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: a string may hold other separators
    except (OSError, UnicodeDecodeError) as error:
        raise SmeltError(f"the batch {path} cannot be read as UTF-8 text ({error}).") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        request = _parse(line, f"line {number} of {path}")
        if request.custom_id in requests:
            raise SmeltError(f"line {number} of {path} repeats the custom_id {request.custom_id!r}.")
        requests[request.custom_id] = request
    if not requests:
        raise SmeltError(f"{path} holds no requests; each line is one, in OpenAI's batch format.")
    return list(requests.values())


def _parse(line: str, where: str) -> BatchRequest:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise SmeltError(f"{where} is not JSON.") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("custom_id"), str):
        raise SmeltError(f"{where} has no custom_id; a request is an object with custom_id, method, url and body.")
    body, url = fields.get("body"), fields.get("url")
    if fields.get("method") != "POST" or url not in URLS:
        raise SmeltError(f"{where} is not a POST to one of {', '.join(URLS)}.")
    if not isinstance(body, dict) or body.get("stream"):
        raise SmeltError(f"{where} needs a body that is an object, without `stream`.")
    return BatchRequest(fields["custom_id"], url, body)


async def run_batch(
    settings: ServerSettings, requests: list[BatchRequest], output: Path, on_progress: Callable[[int], None]
) -> BatchResult:
    """Answer all requests that have no answer yet, and write the output in the order of the requests."""
    answers = PartialAnswers(output, settings.model, requests)
    missing = [request for request in requests if request.custom_id not in answers.lines]
    resumed = len(answers.lines)
    with answers:
        if missing:
            await _answer(settings, missing, answers, on_progress)
    return BatchResult(len(requests), resumed, answers.write_output())


async def _answer(
    settings: ServerSettings, missing: list[BatchRequest], answers: PartialAnswers, on_progress: Callable[[int], None]
) -> None:
    service = Service(settings)
    await service.start()
    tasks = [] if service.supervisor is None else [asyncio.create_task(service.supervisor.watch())]
    try:
        app, waiting = create_app(service), iter(missing)

        async def work() -> None:
            for request in waiting:  # shared by all workers
                answers.add(request.custom_id, await _answer_one(app, request))
                on_progress(len(answers.lines))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(missing), 2 * int(settings.engine.get("max_num_seqs") or 1))):
                group.create_task(work())
    finally:
        for task in tasks:
            task.cancel()
        await service.stop()


async def _answer_one(app: ASGIApp, request: BatchRequest) -> dict[str, Any]:
    """Return a line of the output."""
    request_id = new_request_id()
    for attempt in range(ATTEMPTS):
        status, content = await _call(app, request.url, request.body, request_id)
        if status not in RETRIED or attempt == ATTEMPTS - 1:
            break
        await asyncio.sleep(RETRY_SECONDS * (attempt + 1))
    return {
        "id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": json.loads(content)}, "error": None,
    }  # fmt: skip


async def _call(app: ASGIApp, url: str, body: dict[str, Any], request_id: str) -> tuple[int, bytes]:
    """Call a route of the application in this process."""
    content, status, parts = json.dumps(body).encode(), 0, list[bytes]()
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # the client stays until it is answered
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    headers = {"host": "localhost", "content-type": "application/json", "x-request-id": request_id}
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": "", "client": None, "server": None,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    return status, b"".join(parts)


class PartialAnswers:
    """The answers so far, on disk. The first line says which batch and model they belong to."""

    def __init__(self, output: Path, model: str, requests: list[BatchRequest]) -> None:
        self.output, self.path = output, output.with_name(f"{output.name}.partial")
        self.order = [request.custom_id for request in requests]
        content = json.dumps([(request.custom_id, request.url, request.body) for request in requests])
        self.head = {"model": model, "input_sha256": hashlib.sha256(content.encode()).hexdigest()}
        self.lines: dict[str, dict[str, Any]] = {}
        self._file: BinaryIO | None = None
        self._read()

    def _read(self) -> None:
        """Read what an earlier run has left; drop a last line that was not completed."""
        if self.path.exists():
            content = self.path.read_bytes()
            complete = content[: content.rfind(b"\n") + 1]
            head, *lines = [json.loads(line) for line in complete.splitlines()] or [self.head]
            if head != self.head:
                message = f"{self.path} belongs to another batch or model; move it away, or choose another output."
                raise SmeltError(message)
            self.lines = {line["custom_id"]: line for line in lines}
            if len(complete) < len(content):
                os.truncate(self.path, len(complete))

    def __enter__(self) -> PartialAnswers:
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise SmeltError(f"{self.path} cannot be written ({error.strerror}).") from error
        if not self._file.tell():
            self._write(self.head)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()

    def add(self, custom_id: str, line: dict[str, Any]) -> None:
        self._write(line)
        self.lines[custom_id] = line

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def write_output(self) -> int:
        """Write the output at once and remove the partial one; return how many requests have failed."""
        lines = [json.dumps(self.lines[custom_id], ensure_ascii=False) + "\n" for custom_id in self.order]
        write_atomically(self.output, lambda path: path.write_text("".join(lines), encoding="utf-8"))
        self.path.unlink()
        return sum(line["response"]["status_code"] != 200 for line in self.lines.values())
