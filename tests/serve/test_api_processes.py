"""Several API processes in front of one engine are one server for clients, whichever process answers or dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from smelt.errors import ConfigError, SmeltError
from smelt.serve.server.api_processes import ApiProcesses
from smelt.serve.server.auth import ApiKey
from smelt.serve.server.http_server import bind_socket
from smelt.serve.server.settings import ServeConfig, ServerLimits, ServerSettings, TlsFiles
from smelt.serve.server.shared_table import SharedTable
from tests.serve.server_process import PATIENCE, Server, language_model, start, write_model
from tests.serve.test_adapters import write_adapter

HEADERS = {"authorization": "Bearer administrator"}
REQUEST = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = {**REQUEST, "max_tokens": 1500, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "keys").write_text("administrator admin=allow\nlimited-key rpm=6\n")
    (folder / "adapters").mkdir()
    write_adapter(folder / "adapters" / "poet", language_model(), 1)
    options = ("--api-server-count", "2", "--enable-sleep-mode", "--allow-lora-updates")
    files = ("--api-key-file", str(folder / "keys"), "--lora-root", str(folder / "adapters"))
    server = start(write_model(folder / "tiny"), folder, *options, *files)
    server.http.headers.update(HEADERS)
    yield server
    assert server.end() == 0
    assert "Traceback" not in server.log.read_text() and "Fatal" not in server.log.read_text()


def children(server: Server, command: str) -> list[int]:
    """Return the processes of the server whose command line contains this."""
    pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(pid) for pid in pids if command in Path(f"/proc/{pid}/cmdline").read_text()]


def statuses(server: Server, body: dict[str, Any], count: int, **more: Any) -> list[int]:
    """Send requests, each on a connection of its own; 0 is a timeout."""
    result = []
    for _ in range(count):
        try:
            result.append(server.post("/v1/completions", body, **more).status_code)
        except httpx.TimeoutException:
            result.append(0)
    return result


def stream_ends(server: Server, processes: int) -> tuple[list[threading.Thread], list[str]]:
    """Start long streams, until every process has one; collect how they end."""
    ends: list[str] = []

    def read() -> None:
        try:
            with server.http.stream("POST", server.url + "/v1/completions", json=LONG) as answer:
                ends.append([line for line in answer.iter_lines() if line][-1])
        except httpx.HTTPError as error:
            ends.append(type(error).__name__)

    threads = [threading.Thread(target=read) for _ in range(8 * processes)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda state: state["running"] >= len(threads) // 2)
    return threads, ends


def test_all_processes_answer_and_count_together(server: Server) -> None:
    before = server.state()
    texts = {server.complete(max_tokens=8, ignore_eos=True)["choices"][0]["text"] for _ in range(12)}
    state = server.wait_until_idle()
    assert len(texts) == 1 and state["generated_tokens"] - before["generated_tokens"] == 96
    assert state["finished"]["length"] - before["finished"]["length"] == 12
    assert {server.state()["generated_tokens"] for _ in range(12)} == {state["generated_tokens"]}


def test_what_a_client_aborts_does_not_look_as_if_it_ran(server: Server) -> None:
    with server.http.stream("POST", server.url + "/v1/completions", json=LONG) as answer:
        next(answer.iter_lines())
    server.wait_until_idle(20.0)


def test_a_process_that_hangs_stops_neither_the_engine_nor_the_others(server: Server) -> None:
    stopped = children(server, "api_process")[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        answers = statuses(server, REQUEST, 16, timeout=2.0)
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert 200 in answers and 0 in answers and set(answers) == {0, 200}
    server.wait_until_idle()
    assert statuses(server, REQUEST, 8) == [200] * 8


def test_rate_limits_hold_over_all_processes(server: Server) -> None:
    answers = statuses(server, REQUEST, 14, headers={"authorization": "Bearer limited-key"})
    assert 6 <= answers.count(200) <= 8 and answers.count(429) == 14 - answers.count(200), "one is refilled in 10 s"


def test_an_adapter_is_served_by_all_processes_at_once(server: Server) -> None:
    plain = server.complete(max_tokens=8, ignore_eos=True)["choices"][0]["text"]
    for _ in range(3):
        assert server.post("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "poet"}).status_code == 200
        again = server.post("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "poet"})
        assert again.status_code == 400 and again.json()["error"]["param"] == "lora_name"
        for _ in range(6):
            answer = server.complete(max_tokens=8, ignore_eos=True, model="poet")
            assert answer["choices"][0]["text"] != plain
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 200
        assert statuses(server, {**REQUEST, "model": "poet"}, 6) == [404] * 6


def test_sleep_and_wake(server: Server) -> None:
    assert server.post("/sleep", {}).status_code == 200
    assert {server.get("/health").status_code for _ in range(6)} == {503}
    assert all(server.get("/is_sleeping").json()["is_sleeping"] for _ in range(6))
    assert server.post("/wake_up", {}).status_code == 200
    assert statuses(server, REQUEST, 8) == [200] * 8


def test_a_process_that_dies_is_replaced_and_its_requests_are_aborted(server: Server) -> None:
    threads, ends = stream_ends(server, 2)
    before = children(server, "api_process")
    os.kill(before[0], signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE)
    assert "data: [DONE]" in ends and "RemoteProtocolError" in ends and len(set(ends)) <= 3
    server.wait_until_idle()
    assert statuses(server, REQUEST, 12) == [200] * 12
    after = children(server, "api_process")
    assert len(after) == 2 and len({*before, *after}) == 3


def test_an_engine_that_dies_is_replaced_for_all_processes(server: Server) -> None:
    threads, ends = stream_ends(server, 2)
    os.kill(server.state()["worker"], signal.SIGKILL)
    for thread in threads:
        thread.join(PATIENCE)
    assert len(ends) == len(threads) and all("engine" in end or end == "data: [DONE]" for end in ends)
    until = time.monotonic() + PATIENCE
    while {server.get("/health").status_code for _ in range(8)} != {200}:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert statuses(server, REQUEST, 8) == [200] * 8 and server.state()["restarts"] == 1
    server.wait_until_idle()


def test_nothing_outlives_the_server(tmp_path: Path) -> None:
    server = start(write_model(tmp_path / "tiny"), tmp_path, "--api-server-count", "2")
    pids = children(server, "smelt.serve")
    assert len(pids) == 3
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_port_that_is_taken_is_not_shared() -> None:
    with bind_socket("127.0.0.1", 0, reuse_port=True) as other:
        other.listen()
        settings = ServerSettings("x", port=other.getsockname()[1], api_server_count=2)
        with pytest.raises(SmeltError, match="choose another port"):
            ApiProcesses(settings).run()


def test_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="single engine"):
        ServeConfig(api_server_count=2, replicas=2).resolve("x")


def test_settings_reach_another_process() -> None:
    settings = ServerSettings(
        "model", keys={b"\xff\x00": ApiKey("team", rpm=3)}, limits=ServerLimits(max_queued=7), allowed_origins=("x",),
        tls=TlsFiles("a", "b"), lora_roots=("c",), engine={"page_selection": {"token_budget": 4}},
    )  # fmt: skip
    assert ServerSettings.from_json(settings.to_json()) == settings


def test_rows_of_the_table_are_added_and_cleared() -> None:
    descriptor = os.memfd_create("test")
    tables = [SharedTable(0, 3, row, descriptor) for row in range(3)]
    cells = [table.allocate(2) for table in tables]
    for row, amount in enumerate((1, 10, 100)):
        cells[row].own[1] += amount
    assert all(each.totals() == [0, 111] for each in cells)
    cells[0].clear(1)
    assert cells[2].totals() == [0, 101] and cells[1].own[1] == 0
    with tables[0].lock():
        cells[2].common[0] = 5
    assert cells[1].common[0] == 5
    os.close(descriptor)
