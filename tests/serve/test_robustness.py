"""Clients that leave, cancel, and do not read: every block comes back, memory stays flat, others are served."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import pytest
from benchmarks.serve.visitors import visits

from tests.serve.served import Server

ALLOWED = 32 << 20  # bytes of growth that buffers of the allocator may explain


def test_two_hundred_visitors(server: Server) -> None:
    server.wait_until_idle()
    asyncio.run(visits(server.url, range(1000, 1040)))  # what is allocated once is allocated now
    server.wait_until_idle(20)
    before = server.resident_bytes()
    found = asyncio.run(visits(server.url, range(200)))
    assert "wrong" not in found and found["leaves"] >= 30 and found["leaves early"] >= 20 and found["stop"] >= 30
    state = server.wait_until_idle(20)
    assert state["blocks_used"] == 0 and state["answers"] == 0 and state["ended"]["error"] == 0
    assert server.resident_bytes() - before < ALLOWED


def test_who_leaves_frees_its_blocks_at_the_next_step(server: Server) -> None:
    server.wait_until_idle()
    aborted = server.state()["ended"]["abort"]
    body = {"prompt": "x" * 100, "max_tokens": 1900, "ignore_eos": True, "n": 4}
    for stream in (True, False):
        if stream:
            with server.http.stream(
                "POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=20
            ) as answer:
                lines = answer.iter_lines()
                assert next(lines)
                server.wait_until(lambda state: state["running"] == 4)
        else:
            with pytest.raises(httpx.ReadTimeout):
                server.http.post(server.url + "/v1/completions", json=body, timeout=0.5)
        left = time.monotonic()
        server.wait_until_idle(3)
        assert time.monotonic() - left < 1.5
    assert server.state()["ended"]["abort"] == aborted + 8


def test_a_hundred_long_requests_that_leave_do_not_delay_the_next(server: Server) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(timeout=0.7) as client:
            body = {"prompt": "y" * 50, "max_tokens": 1900, "ignore_eos": True}
            asks = [client.post(server.url + "/v1/completions", json=body) for _ in range(100)]
            found = await asyncio.gather(*asks, return_exceptions=True)
        assert sum(isinstance(each, httpx.TimeoutException) for each in found) > 90

    asyncio.run(leave())
    started = time.monotonic()
    assert server.complete("hello", max_tokens=5)["usage"]["completion_tokens"] == 5
    assert time.monotonic() - started < 2
    server.wait_until_idle()


def test_who_does_not_read_is_dropped_while_others_are_served(server: Server) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = {"prompt": "z", "max_tokens": 1900, "ignore_eos": True, "n": 4, "logprobs": 20, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" \
           f"Content-Length: {len(content)}\r\n\r\n"  # fmt: skip
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect((host, int(port)))
        silent.sendall(head.encode() + content)
        server.wait_until(lambda state: state["running"] == 4)
        started = time.monotonic()
        assert server.complete("hello", max_tokens=5)["choices"][0]["text"]
        assert time.monotonic() - started < 2
        server.wait_until_idle(30)
        time.sleep(1.6)  # all that was generated before it was dropped is dropped too
        silent.settimeout(5)
        found = b""
        try:
            while part := silent.recv(1 << 20):
                found += part
        except ConnectionResetError:
            pass
    assert b"[DONE]" not in found


def test_priorities_go_first(server: Server) -> None:
    """A queue behind one long batch: who matters more (a lower number) is begun before who came first."""
    server.wait_until_idle()

    async def main() -> list[int]:
        order: list[int] = []
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def ask(priority: int, tokens: int, n: int) -> None:
                body = {"prompt": "p", "max_tokens": tokens, "ignore_eos": True, "priority": priority, "n": n}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                order.append(priority)

            first = [asyncio.create_task(ask(-1000, 80, 128)) for _ in range(2)]  # all 256 places
            await asyncio.sleep(0.2)
            rest = [asyncio.create_task(ask(priority, 20, 100)) for priority in (7, 5, -5)]
            await asyncio.gather(*first, *rest)
        return order

    assert asyncio.run(main())[2:] in ([-5, 5, 7], [-5, 7, 5])
