"""All replicas as one engine, without Ray: rerouting when a replica dies, aggregated counts, and shutdown."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import smelt
from smelt.errors import RequestError, SmeltError
from smelt.serve.cluster import client as client_file
from smelt.serve.cluster.client import LOST_SECONDS, MAX_ATTEMPTS, ClusterClient
from smelt.serve.cluster.placement import Placement, resolve_placement
from smelt.serve.cluster.ray_serve import RayServe, _error_message
from smelt.serve.cluster.supervisor import ClusterSupervisor
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.server.settings import ServeConfig, ServerLimits
from smelt.serve.worker.client import TokenEvent, WorkerDiedError
from smelt.serve.worker.messages import EngineReady, decode

STATE = {"running": 1, "waiting": 0, "blocks": 8, "blocks_used": 2, "steps": 5, "computed_tokens": 9}
DIED = {"died": True}


def status_reply(replica: str, *events: list[Any], clock: float = 0.0, **state: int) -> dict[str, Any]:
    return {"replica": replica, "now": time.monotonic() + clock, "state": STATE | state, "events": list(events)}


def token(number: int, reason: str = "", answer: int = 0, started: float = 0.0) -> list[Any]:
    return [answer, number, None, reason, 0, started, None]


class Call:
    """One replica's scripted response; `None` waits forever."""

    def __init__(self, script: list[Any]) -> None:
        self.script, self.cancelled = script, False

    async def __aiter__(self) -> AsyncIterator[str]:
        for event in self.script:
            if isinstance(event, Exception):
                raise event
            if event is None:
                await asyncio.Event().wait()
            yield json.dumps(event)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Fake Ray handle: each request gets the next script, each poll the states of the living replicas."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.calls = list(scripts), list[Call]()
        self.there: list[Any] = []
        self.fault: Exception | None = None
        self.aborted: list[Any] = []
        self.generate = self

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, message: str) -> Call:
        assert decode(message).prompt == [1, 2]  # type: ignore[union-attr]
        self.calls.append(Call(self.scripts.pop(0)))
        return self.calls[-1]

    def broadcast(self, method: str, aborted: list[Any]) -> Handle:
        assert method == "poll"
        self.aborted += aborted
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s and return_exceptions
        if self.fault is not None:
            raise self.fault
        return [state if isinstance(state, Exception) else json.dumps(state) for state in self.there]


def make_client(handle: Handle, seen: list[dict[str, int]] | None = None) -> ClusterClient:
    observe = None if seen is None else lambda state: seen.append(dict(state))
    client = ClusterClient("none", RayServe(Placement(2)), step_timeout=9, heartbeat_timeout=9, observe=observe)
    client._handle = handle
    client.engine = EngineReady("x", 64, 64, 257, "none", 8, 16, STATE)
    client._update_replica(status_reply("a"))
    return client


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 120))


async def collect(client: ClusterClient, n: int = 1) -> list[TokenEvent]:
    stream = client.stream([[1, 2]], SamplingParams(n=n))
    received: list[TokenEvent] = []
    try:
        while events := await stream.next():
            received += events
    finally:
        stream.close()
    return received


def test_a_request_without_any_token_moves_to_another_replica() -> None:
    async def main() -> None:
        handle = Handle(
            [RuntimeError("gone")], [DIED], [status_reply("b", token(7)), status_reply("b", token(8, "stop"))]
        )
        assert [event.token for event in await collect(make_client(handle))] == [7, 8]
        assert not handle.scripts and not any(call.cancelled for call in handle.calls)

    run(main)


@pytest.mark.parametrize("end", [DIED, RuntimeError("gone")], ids=["engine", "actor"])
def test_a_started_answer_is_not_restarted(end: Any) -> None:
    async def main() -> None:
        handle = Handle([status_reply("a", token(7)), end], [status_reply("b", token(7, "stop"))])
        with pytest.raises(WorkerDiedError, match="send it again"):
            await collect(make_client(handle))
        assert len(handle.calls) == 1

    run(main)


def test_lost_or_rejected_requests_fail_after_the_last_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_file, "RETRY_SECONDS", 0)

    async def main() -> None:
        handle = Handle(*[[DIED]] * MAX_ATTEMPTS, [status_reply("a", token(7, "stop"))])
        with pytest.raises(WorkerDiedError):
            await collect(make_client(handle))
        assert len(handle.calls) == MAX_ATTEMPTS
        with pytest.raises(RequestError, match="too long"):
            await collect(make_client(Handle([{"rejected": "too long"}])))

    run(main)


def test_times_are_converted_to_the_local_clock() -> None:
    """A replica on another machine has a different clock origin."""

    async def main() -> None:
        ahead = 5000.0
        client = make_client(
            Handle([status_reply("b", token(7, "stop", started=time.monotonic() + ahead), clock=ahead)])
        )
        (event,) = await collect(client)
        assert abs(event.started - time.monotonic()) < ahead / 2

    run(main)


def test_leaving_cancels_and_one_aborted_sample_is_reported_at_the_next_poll() -> None:
    async def main() -> None:
        handle = Handle([status_reply("a", token(7), token(8, answer=1)), None])
        client = make_client(handle)
        stream = client.stream([[1, 2]], SamplingParams(n=2))
        assert len(await stream.next()) == 2
        stream.abort(1)
        handle.there = [status_reply("a")]
        await client.poll()
        assert handle.aborted == [("0", 1)]
        stream.close()
        await asyncio.sleep(0.05)
        assert handle.calls[0].cancelled
        await client.poll()
        assert handle.aborted == [("0", 1)], "a cancelled call needs no more"

    run(main)


def test_counters_never_decrease_and_gauges_cover_living_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        states: list[dict[str, int]] = []
        handle = Handle()
        client = make_client(handle, states)
        handle.there = [status_reply("a"), status_reply("b", steps=70, running=3)]
        assert await client.poll() == []
        assert (states[-1]["steps"], states[-1]["running"], states[-1]["blocks"]) == (75, 4, 16)
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + LOST_SECONDS + 1)
        handle.there = [status_reply("a", steps=6), RuntimeError("gone")]
        assert await client.poll() == ["b"]
        assert (states[-1]["steps"], states[-1]["running"], states[-1]["blocks"]) == (76, 1, 8)
        handle.there = [status_reply("a", steps=6), status_reply("b", steps=71)]  # it was only slow
        await client.poll()
        assert states[-1]["steps"] == 77
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + LOST_SECONDS + 1)
        handle.fault = TimeoutError()  # one hangs: no replica's state is known
        assert await client.poll() == [] and client.alive
        handle.fault = RuntimeError("no replica")
        assert sorted(await client.poll()) == ["a", "b"] and not client.alive
        assert (states[-1]["steps"], states[-1]["running"], states[-1]["blocks"]) == (77, 0, 0)
        with pytest.raises(WorkerDiedError):
            client.stream([[1, 2]], SamplingParams())

    run(main)


def test_an_out_of_order_message_does_not_decrease_counters() -> None:
    async def main() -> None:
        states: list[dict[str, int]] = []
        client = make_client(Handle([status_reply("a", token(7, "stop"), steps=6, clock=-9)]), states)
        client._update_replica(status_reply("a", steps=8))
        assert [event.token for event in await collect(client)] == [7]
        assert states[-1]["steps"] == 8

    run(main)


def test_replicas_that_die_too_often_are_given_up() -> None:
    async def main() -> None:
        handle = Handle()
        supervisor = ClusterSupervisor(make_client(handle), ServerLimits(max_restarts=1), replicas=2)
        assert supervisor.unhealthy_reason == ""
        for name in ("a", "b"):
            supervisor._on_replica_lost(name)
        assert not supervisor.given_up.is_set()
        supervisor._on_replica_lost("c")
        assert supervisor.given_up.is_set()
        supervisor.client.replicas.clear()
        assert supervisor.unhealthy_reason == "no replica is running."

    run(main)


def test_resources_per_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert resolve_placement(ServeConfig(replicas=3)) == Placement(3, cpus=2)
    assert resolve_placement(ServeConfig(replicas=16)).cpus == 1
    config = ServeConfig(replicas=2, ray_address="10.0.0.1:6379", replica_cpus=4, device="cuda", tensor_parallel_size=2)
    assert resolve_placement(config) == Placement(2, "10.0.0.1:6379", cpus=4, gpus=2)
    with pytest.raises(SmeltError, match="use --device cuda instead of cuda:1"):
        resolve_placement(ServeConfig(replicas=2, device="cuda:1"))
    with pytest.raises(SmeltError, match="machine of the cluster"):
        resolve_placement(ServeConfig(replicas=2, ray_address="ray://10.0.0.1:10001"))


class Ray(ModuleType):
    """Fake Ray package: a cluster of two cores."""

    def init(self, **options: Any) -> None:
        assert options["address"] == "127.0.0.1:1"

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (Placement(2, "127.0.0.1:1", cpus=9), "2 replicas with 9 CPUs each were requested; Ray has 2"),
        (Placement(1, "127.0.0.1:1", gpus=1), "1 replicas with 1 GPUs each were requested; Ray has 0"),
    ],
)
def test_more_resources_than_available_are_refused(
    wanted: Placement, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would wait forever."""
    monkeypatch.setitem(sys.modules, "ray", Ray("ray"))
    monkeypatch.setitem(sys.modules, "ray.serve", ModuleType("ray.serve"))
    with pytest.raises(SmeltError, match=r"no Ray cluster at 127\.0\.0\.1:1 "):
        RayServe(wanted)._connect()
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: socket.socket())
    with pytest.raises(SmeltError, match=sentence):
        RayServe(wanted)._connect()


def test_our_message_is_extracted_from_rays_error() -> None:
    raised = 'Traceback:\n  File "replica.py", line 1\nsmelt.errors.ModelError: no model at x.\nsome more of Ray'
    assert _error_message(raised) == "no model at x."
    assert "see Ray's logs" in _error_message("RuntimeError: x")


def test_the_command_without_ray_or_with_a_wrong_number(tmp_path: Any) -> None:
    code = "import sys; sys.modules['ray'] = None\nfrom smelt.cli.main import main; main(sys.argv[1:])"
    for options, sentence in (
        (["2"], "pip install 'smeltml[cluster]'"),
        (["0"], "--replicas"),
        (["two"], "--replicas"),
    ):
        command = [sys.executable, "-c", code, "serve", str(tmp_path), "--replicas", *options]
        completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert completed.returncode == 2 and sentence in completed.stderr and "Traceback" not in completed.stderr, (
            completed.stderr
        )


def test_ray_is_imported_lazily_and_in_few_files() -> None:
    source = Path(smelt.__file__).parent
    ray_import = re.compile(r"^ *(?:import|from) ray\b", re.MULTILINE)
    importers = {file for file in source.rglob("*.py") if ray_import.search(file.read_text(encoding="utf-8"))}
    names = ("ray_start.py", "serve/cluster/ray_serve.py", "serve/cluster/replica.py", "train/on_ray.py")
    assert importers == {source / name for name in names}
    assert not any(re.search(r"^(?:import|from) ray\b", file.read_text(encoding="utf-8"), re.M) for file in importers)
