"""Access control: keys on every route, constant-time comparison, host names and origins of this machine only."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smelt.errors import SmeltError
from smelt.serve.server import auth
from smelt.serve.server.auth import check_binding, find_key, is_loopback, read_keys
from smelt.serve.server.middleware import RequestGuard
from smelt.serve.server.rate_limit import RateLimits
from smelt.serve.server.settings import ServerLimits, ServerSettings
from smelt.serve.server.shared_table import SharedTable
from smelt.version import __version__
from tests.serve.conftest import KEYS
from tests.serve.server_process import Server

ROUTES = (
    *(("GET", path) for path in ("/metrics", "/state", "/version", "/v1/models", "/openapi.json", "/x")),
    *(
        ("POST", path)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize")
    ),
    ("OPTIONS", "/v1/completions"),
)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_a_key(keyed: Server, method: str, path: str) -> None:
    def status(**headers: str) -> int:
        return keyed.http.request(method, keyed.url + path, headers=headers).status_code

    wrong = ["", "Bearer", "Bearer wrong", f"Bearer {KEYS[0]}x", f"Bearer {KEYS[0][:-1]}", f"Token {KEYS[0]}",
             "Basic !!", "Bearer " + ",".join(KEYS)]  # fmt: skip
    assert [status(authorization=value) for value in wrong] == [401] * len(wrong)
    assert status() == 401
    basic = base64.b64encode(f"me:{KEYS[1]}".encode()).decode()
    right: list[dict[str, str]] = [
        *({"authorization": f"Bearer {key}"} for key in KEYS),
        {"x-api-key": KEYS[0]},
        {"authorization": f"Basic {basic}"},
    ]
    assert all(status(**value) not in (401, 403) for value in right)


def test_disguised_paths_need_a_key_too(keyed: Server) -> None:
    """CVE-2026-48746: a guard that trusts the path can be bypassed."""
    for path in (
        "/health/../v1/models",
        "//health",
        "/v1/models?x=/health",
        "/%2e/health",
        "/HEALTH",
        "/v1/models#/health",
    ):
        assert keyed.get(path).status_code == 401
    assert keyed.post("/health", {}).status_code == 401


def test_probes_need_no_key_and_learn_nothing_else(keyed: Server) -> None:
    for path in ("/health", "/ping"):
        answer = keyed.get(path)
        assert answer.status_code == 200 and answer.json() == {"status": "ok"}


def test_pages_need_no_key_and_say_nothing_about_the_server(keyed: Server) -> None:
    for path in ("/", "/docs"):
        answer = keyed.get(path)
        assert answer.status_code == 200 and answer.text == keyed.get(path, headers={"x-api-key": KEYS[0]}).text
        assert not any(word in answer.text for word in ("tiny", __version__))
        assert keyed.post(path, {}).status_code == 401
    challenges = [
        keyed.get("/state", headers=headers).headers["www-authenticate"] for headers in ({}, {"x-api-key": ""})
    ]
    assert "Basic" in challenges[0] and challenges[1] == "Bearer"  # else the browser would prompt beside the page


def test_the_challenge_reveals_nothing_about_keys(keyed: Server) -> None:
    answer = keyed.get("/v1/models")
    assert (
        answer.headers["www-authenticate"].startswith("Bearer") and answer.json()["error"]["code"] == "invalid_api_key"
    )
    assert not any(key in answer.text + keyed.log.read_text() for key in KEYS)


def test_keys_do_not_share_cached_prompts(keyed: Server) -> None:
    """CVE-2025-46570: timing a prompt must not reveal another key's prompts."""

    def cached(key: str) -> int:
        body = {"prompt": "a prompt long enough for several blocks " * 3, "max_tokens": 1}
        answer = keyed.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"}).json()
        result: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return result

    assert [cached(key) > 0 for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[1])] == [False, False, True, True]


def test_a_full_queue_returns_retry_after(keyed: Server) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 2}
    with keyed.http.stream("POST", keyed.url + "/v1/completions", json=body, headers=headers, timeout=300) as running:
        assert running.status_code == 200
        with keyed.paused(keyed.get("/state", headers=headers).json()["worker"]):
            refused = keyed.post("/v1/completions", {"prompt": "x"}, headers=headers)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert keyed.get("/health", headers=headers).status_code == 200
    too_many = keyed.post("/v1/completions", {"prompt": "x", "n": 3}, headers=headers)
    assert too_many.status_code == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost"}, 200), ({"host": "127.0.0.1:9"}, 200), ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 403), ({"host": "evil.example:8000"}, 403), ({"host": "localhost.evil"}, 403),
        ({"host": "0.0.0.0"}, 403), ({"host": ""}, 403), ({"host": "127.0.0.1.nip.io"}, 403),
        ({"host": "localhost", "origin": "http://localhost"}, 200),
        ({"host": "localhost:8000", "origin": "http://localhost:9000"}, 403),
        ({"host": "localhost", "origin": "https://evil.example"}, 403), ({"host": "localhost", "origin": "null"}, 403),
    ],
)  # fmt: skip
def test_host_names_and_origins(server: Server, headers: dict[str, str], status: int) -> None:
    """DNS rebinding (CVE-2025-62593 of Ray), and pages of other sites."""
    answer = server.get("/health", headers=headers)
    assert answer.status_code == status
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_a_public_address_needs_keys(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org", ""):
        with pytest.raises(SmeltError, match="--api-key-file"):
            check_binding(host, frozenset())
        check_binding(host, frozenset([b"x"]))
    for host in ("127.0.0.1", "::1", "localhost", "127.5.5.5"):
        assert is_loopback(host)
        check_binding(host, frozenset())
    command = [sys.executable, "-m", "smelt.cli.main", "serve", str(tmp_path), "--host", "0.0.0.0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1 and "--api-key-file" in ended.stderr


def test_the_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n# none\n  first-long-key \nsecond-long-key\n\n")
    assert set(read_keys(file)) == {hashlib.sha256(key).digest() for key in (b"first-long-key", b"second-long-key")}
    for content, sentence in (("", "no API key"), ("# only this\n", "no API key"), ("short\n", "fewer than 8")):
        file.write_text(content)
        with pytest.raises(SmeltError, match=sentence):
            read_keys(file)
    with pytest.raises(SmeltError, match="cannot be read"):
        read_keys(tmp_path / "nothing")


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-59425: compare digests of all keys, whichever matches."""
    keys = [hashlib.sha256(b"%d" % number).digest() for number in range(5)]
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(auth, "hmac", SimpleNamespace(compare_digest=compare))
    for key in (b"0", b"4", b"none"):
        compared.clear()
        matched = find_key(keys, [(b"authorization", b"Bearer " + key)])
        assert (matched is not None) == (key != b"none")
        assert [one for one, _ in compared] == keys and all(len(other) == 32 for _, other in compared)


def guard_status(settings: ServerSettings, messages: list[dict[str, Any]], headers: list[tuple[bytes, bytes]]) -> int:
    """Return the middleware's status, or 200 where the request reaches the application."""
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        elif statuses[0] != 200:
            assert set(json.loads(message["body"])["error"]) == {"message", "type", "param", "code"}

    scope = {"type": "http", "headers": headers, "raw_path": b"/", "query_string": b"", "method": "POST", "path": "/"}
    asyncio.run(RequestGuard(app, settings, RateLimits(settings.keys, SharedTable()))(scope, receive, send))
    return statuses[0] if statuses else 0


def test_a_body_is_limited_in_size_and_time_as_it_arrives() -> None:
    settings = ServerSettings("x", limits=ServerLimits(max_body_bytes=100, body_timeout=0.05))
    host = [(b"host", b"localhost")]
    part: dict[str, Any] = {"type": "http.request", "body": b"x" * 60, "more_body": True}
    last = {**part, "body": b"x" * 40, "more_body": False}
    assert guard_status(settings, [part, last], host) == 200
    assert guard_status(settings, [part, part, last], host) == 413
    assert guard_status(settings, [last], [*host, (b"content-length", b"101")]) == 413
    assert guard_status(settings, [part], host) == 408
    assert guard_status(settings, [part, {"type": "http.disconnect"}], host) == 0
    assert (
        guard_status(ServerSettings("x", limits=ServerLimits(max_header_bytes=50)), [last], [*host, (b"x", b"y" * 50)])
        == 431
    )


def test_internal_errors_reveal_nothing_of_the_request(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("secret prompt")

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "headers": [(b"host", b"localhost")],
        "raw_path": b"/",
        "query_string": b"",
        "method": "GET",
    }
    asyncio.run(
        RequestGuard(app, ServerSettings("x"), RateLimits({}, SharedTable()))({**scope, "path": "/"}, receive, send)
    )
    assert sent[0]["status"] == 500 and b"secret" not in sent[1]["body"]
    assert "secret" not in caplog.text
