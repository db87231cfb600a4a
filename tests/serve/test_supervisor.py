"""The supervisor of the engine's process, with a fake engine that cannot start, dies, or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable

import pytest

from smelt.errors import SmeltError
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.server.metrics import ServerMetrics
from smelt.serve.server.settings import ServerLimits
from smelt.serve.server.supervisor import EngineSupervisor
from smelt.serve.worker import loop
from smelt.serve.worker.client import EngineClient, OtherModelError, WorkerDiedError
from smelt.serve.worker.messages import Heartbeat, StartEngine, StartFailed, pipe_pair
from tests.serve.fake_engine import fake_engine_command
from tests.serve.server_process import PATIENCE

LISTENS = "ready()\nwhile True: pipe.receive()"


def make_supervisor(script: str, **limits: float) -> EngineSupervisor:
    client = EngineClient("nothing")
    client.command = fake_engine_command(script)  # type: ignore[assignment]
    supervisor = EngineSupervisor(client, ServerLimits(**limits))  # type: ignore[arg-type]
    supervisor.metrics = ServerMetrics("x", 64)
    return supervisor


def _has_restarted(supervisor: EngineSupervisor, times: int) -> Callable[[], bool]:
    return lambda: (
        supervisor.metrics is not None
        and supervisor.metrics.restarts.value == times
        and not supervisor.unhealthy_reason
    )


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("script", "kind", "told"),
    [
        ("pipe.send(StartFailed('no such model.'))", SmeltError, "no such model"),
        ("pipe.send(NotALanguageModel('x', 'images'))", OtherModelError, "for images"),
        ("sys.exit(3)", SmeltError, "ended while it was starting"),
    ],
)
def test_an_engine_that_cannot_start(script: str, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        asyncio.run(make_supervisor(script).start())


def test_the_real_process_reports_why_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pipe_pair()
    monkeypatch.setattr(sys, "argv", ["loop", str(theirs.detach())])
    monkeypatch.setattr(loop.signal, "signal", lambda *_: None)
    ours.send(StartEngine("/there/is/nothing"))
    with pytest.raises(SystemExit, match="2"):
        loop.main()
    while isinstance(failed := ours.receive(), Heartbeat):
        continue
    assert isinstance(failed, StartFailed) and failed.message.startswith("no model at /there/is/nothing")


def test_an_engine_that_keeps_dying_is_given_up() -> None:
    async def main() -> None:
        supervisor = make_supervisor("ready()", max_restarts=2)
        await supervisor.start()
        async with asyncio.timeout(PATIENCE):
            await supervisor.watch()
        assert (
            supervisor.given_up.is_set() and supervisor.metrics is not None and supervisor.metrics.restarts.value == 2
        )
        assert supervisor.unhealthy_reason == "the engine's process is not running."

    asyncio.run(main())


def test_old_deaths_do_not_count() -> None:
    async def main() -> None:
        supervisor = make_supervisor(LISTENS, max_restarts=1, restart_window=0.0)
        await supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        for restarts in (1, 2, 3):
            supervisor.client.kill()
            await until(_has_restarted(supervisor, restarts))
        watching.cancel()
        await supervisor.client.stop()

    asyncio.run(main())


def test_a_hanging_engine_is_detected_and_replaced_without_blocking() -> None:
    """Not even with more submitted than its pipe holds."""

    async def main() -> None:
        supervisor = make_supervisor(LISTENS, step_timeout=0.6)
        await supervisor.start()
        client = supervisor.client
        assert client.process is not None and supervisor.unhealthy_reason == ""
        first = client.process.pid
        os.kill(first, signal.SIGSTOP)
        await asyncio.sleep(0.8)
        assert supervisor.unhealthy_reason == ""  # the client does not wait
        streams = [
            client.stream([[9] * 2000] * 8, SamplingParams()) for _ in range(40)
        ]  # would block forever if it waited
        assert client.alive
        await until(lambda: "no step was finished for 0.6 seconds" in supervisor.unhealthy_reason)
        watching = asyncio.create_task(supervisor.watch())
        for stream in streams:
            with pytest.raises(WorkerDiedError):
                async with asyncio.timeout(PATIENCE):
                    await stream.next()
        await until(lambda: not supervisor.unhealthy_reason)
        assert client.process.pid != first and client.silent_seconds == 0
        watching.cancel()
        await client.stop()
        assert client.process.returncode is not None

    asyncio.run(main())


def test_an_engine_that_does_not_exit_is_killed() -> None:
    async def main() -> None:
        supervisor = make_supervisor("ready()\ntime.sleep(60)")
        await supervisor.start()
        await supervisor.client.stop(0.3)
        assert supervisor.client.process is not None and supervisor.client.process.returncode == -signal.SIGKILL

    asyncio.run(main())
