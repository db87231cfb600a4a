"""Clients that leave, cancel, or do not read: every block is freed, memory stays flat, others are served."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import pytest
from benchmarks.serve.clients import run_clients

from tests.serve.server_process import PATIENCE, Server

ALLOWED = 32 << 20  # bytes of growth attributed to allocator buffers


def test_two_hundred_mixed_clients(server: Server) -> None:
    server.wait_until_idle()
    asyncio.run(run_clients(server.url, range(1000, 1040)))  # warm up one-time allocations
    server.wait_until_idle()
    before = server.resident_bytes()
    outcomes = asyncio.run(run_clients(server.url, range(200)))
    assert (
        "wrong" not in outcomes
        and outcomes["leaves"] >= 30
        and outcomes["leaves early"] >= 20
        and outcomes["stop"] >= 30
    )
    state = server.wait_until_idle()
    assert state["blocks_used"] == 0 and state["admitted"] == 0 and state["finished"]["error"] == 0
    assert server.resident_bytes() - before < ALLOWED


LONG = {"prompt": "x" * 100, "max_tokens": 1900, "ignore_eos": True}


def post_without_reading(server: Server, body: dict[str, object], receive_buffer: int | None = None) -> socket.socket:
    """Open a connection that sends a request and reads nothing."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" \
           f"Content-Length: {len(content)}\r\n\r\n"  # fmt: skip
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.connect((host, int(port)))
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(server: Server, stream: bool) -> None:
    before = server.wait_until_idle()
    with post_without_reading(server, {**LONG, "n": 4, "stream": stream}):
        server.wait_until(lambda state: state["running"] == 4)
    after = server.wait_until_idle()
    assert after["finished"]["abort"] == before["finished"]["abort"] + 4
    assert after["finished"]["length"] == before["finished"]["length"], "nothing was computed to its end"


def test_a_hundred_abandoned_long_requests_do_not_delay_the_next(server: Server) -> None:
    before = server.wait_until_idle()
    connections = [post_without_reading(server, LONG) for _ in range(100)]
    server.wait_until(lambda state: state["admitted"] == 100)
    for connection in connections:
        connection.close()
    assert server.complete("hello", max_tokens=5)["usage"]["completion_tokens"] == 5
    after = server.wait_until_idle()
    assert after["finished"]["abort"] == before["finished"]["abort"] + 100
    assert after["finished"]["length"] == before["finished"]["length"] + 1, "only the last was computed to its end"


def test_a_client_that_does_not_read_is_dropped_while_others_are_served(server: Server) -> None:
    """The answers take longer than the second that the client has."""
    before = server.wait_until_idle()
    body = {**LONG, "n": 32, "logprobs": 20, "stream": True}
    with post_without_reading(server, body, receive_buffer=4096) as silent:
        server.wait_until(lambda state: state["running"] >= 4)
        assert server.complete("hello", max_tokens=5)["choices"][0]["text"]
        after = server.wait_until_idle()
        assert after["finished"]["abort"] == before["finished"]["abort"] + 32
        silent.settimeout(PATIENCE)
        content = b""
        try:
            while part := silent.recv(1 << 20):
                content += part
        except ConnectionResetError:
            pass
    assert b"[DONE]" not in content


def test_higher_priority_runs_first(server: Server) -> None:
    """A request of higher priority (a lower number) starts before one that arrived earlier."""
    server.wait_until_idle()
    order: list[int] = []

    async def main() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:

            async def ask(priority: int, n: int) -> None:
                body = {"prompt": "p", "max_tokens": 20, "ignore_eos": True, "priority": priority, "n": n}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                order.append(priority)

            tasks, answers = [], 0
            with server.paused():  # all arrive before the first starts
                for priority, n in ((-1000, 128), (-1000, 128), (7, 100), (5, 100), (-5, 100)):  # 256 run at once
                    tasks.append(asyncio.create_task(ask(priority, n)))
                    answers += n
                    while server.state()["admitted"] < answers:
                        await asyncio.sleep(0.02)
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert order[2:] in ([-5, 5, 7], [-5, 7, 5])
