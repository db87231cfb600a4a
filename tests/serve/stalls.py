"""Requests that cost a server much, and a bystander that measures how long they stop its stream and /health."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

TIMEOUT = 120.0


@dataclass(frozen=True)
class Gaps:
    """The longest times without a token, and for /health to answer, in seconds."""

    token: float
    health: float
    statuses: list[int]  # of the requests meanwhile


def prompts() -> Iterator[bytes]:
    """256 prompts of 3,960 characters each, four times; each is too long for a small context."""
    text = "the quick brown fox, again and again; 12345 " * 90
    for number in range(4):
        yield _body(
            "/v1/completions",
            {
                "prompt": [f"{number}{index:03} {text[:3956]}"[:3960] for index in range(256)],
                "max_tokens": 2000,
            },
        )


def chats() -> Iterator[bytes]:
    """A conversation of 2,048 messages, four times."""
    for number in range(4):
        messages = [
            {"role": ("user", "assistant")[index % 2], "content": f"message {number} {index}: " + "hello there " * 8}
            for index in range(2047)
        ]
        yield _body("/v1/chat/completions", {"messages": messages, "max_tokens": 1})


def schemas() -> Iterator[bytes]:
    """A schema of 6,000 values, eight times, each another."""
    for number in range(8):
        schema = {"enum": [f"v{number}{index}" for index in range(6000)]}
        wanted = {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}
        yield _body("/v1/completions", {"prompt": "one", "max_tokens": 4, "response_format": wanted})


def expressions() -> Iterator[bytes]:
    """Nested repetitions, eight times."""
    for number in range(8):
        nested = {"regex": f"(((a{{50,{200 + number}}}){{50,200}}){{50,200}}){{50,200}}"}
        yield _body("/v1/completions", {"prompt": "one", "max_tokens": 32, "structured_outputs": nested})


def long_prompts() -> Iterator[bytes]:
    """A prompt of about 1,800 tokens of most tokenizers, twice."""
    for number in range(2):
        text = f"{number} " + "the quick brown fox jumps over the lazy dog " * 200
        yield _body("/v1/completions", {"prompt": text, "max_tokens": 2})


ATTACKS: dict[str, Callable[[], Iterator[bytes]]] = {
    "prompts": prompts,
    "chats": chats,
    "schemas": schemas,
    "expressions": expressions,
    "long prompts": long_prompts,
}


def _body(path: str, fields: dict[str, object]) -> bytes:
    """Return a path and a request body, ready to be sent."""
    return f"{path}\n{json.dumps(fields)}".encode()


def measure(url: str, attack: Callable[[], Iterator[bytes]] | None, idle_seconds: float = 2.0) -> Gaps:
    """Stream an answer and ask for /health, while all requests of an attack are sent at once (None: no attack)."""
    bodies = [content.partition(b"\n") for content in attack()] if attack is not None else []
    stop, streaming = threading.Event(), threading.Event()
    with ThreadPoolExecutor(len(bodies) + 2) as pool:
        token = pool.submit(_longest_token_gap, url, stop, streaming)
        try:
            assert streaming.wait(TIMEOUT), "the stream has not begun"
            health = pool.submit(_longest_health, url, stop)
            if bodies:
                sent = [pool.submit(_post, url, path.decode(), body) for path, _, body in bodies]
                statuses = [each.result() for each in sent]
            else:
                time.sleep(idle_seconds)
                statuses = []
            time.sleep(0.3)  # what the requests have left behind
        finally:
            stop.set()
        return Gaps(token.result(), health.result(), statuses)


def _post(url: str, path: str, body: bytes) -> int:
    """Send a request with the plainest client: the work of another would delay the bystander, in the same process."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def _longest_token_gap(url: str, stop: threading.Event, streaming: threading.Event) -> float:
    """Stream answers one after the other until told to stop; the time to a first token does not count."""
    longest = 0.0
    with httpx.Client(timeout=TIMEOUT) as client:
        while not stop.is_set():
            longest = max(longest, _stream(client, url, stop, streaming))
    return longest


def _stream(client: httpx.Client, url: str, stop: threading.Event, streaming: threading.Event) -> float:
    fields = {"prompt": "Once", "stream": True, "ignore_eos": True, "max_tokens": 400, "temperature": 0}
    longest = last = 0.0
    with client.stream("POST", f"{url}/v1/completions", json=fields) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.monotonic()
            longest, last = max(longest, now - last if last else 0.0), now
            streaming.set()
            if stop.is_set():
                break
    return longest


def _longest_health(url: str, stop: threading.Event) -> float:
    longest = 0.0
    with httpx.Client(timeout=TIMEOUT) as client:
        while not stop.is_set():
            begun = time.monotonic()
            client.get(f"{url}/health")
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.02)
    return longest
