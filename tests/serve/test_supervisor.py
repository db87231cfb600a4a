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
from smelt.serve.worker.messages import StartEngine, StartFailed, pipe_pair
from tests.serve.fake_engine import pretending
from tests.serve.server_process import PATIENCE

LISTENS = "ready()\nwhile True: pipe.receive()"


def supervised(script: str, **limits: float) -> EngineSupervisor:
    client = EngineClient("nothing")
    client.command = pretending(script)  # type: ignore[assignment]
    result = EngineSupervisor(client, ServerLimits(**limits))  # type: ignore[arg-type]
    result.metrics = ServerMetrics("x", 64)
    return result


def _restarted(found: EngineSupervisor, times: int) -> Callable[[], bool]:
    return lambda: found.metrics is not None and found.metrics.restarts.value == times and not found.unhealthy_reason


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
        asyncio.run(supervised(script).start())


def test_the_real_process_reports_why_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pipe_pair()
    monkeypatch.setattr(sys, "argv", ["loop", str(theirs.detach())])
    monkeypatch.setattr(loop.signal, "signal", lambda *_: None)
    ours.send(StartEngine("/there/is/nothing"))
    with pytest.raises(SystemExit, match="2"):
        loop.main()
    failed = ours.receive()
    assert isinstance(failed, StartFailed) and failed.message.startswith("no model at /there/is/nothing")


def test_an_engine_that_keeps_dying_is_given_up() -> None:
    async def main() -> None:
        result = supervised("ready()", max_restarts=2)
        await result.start()
        async with asyncio.timeout(PATIENCE):
            await result.watch()
        assert result.given_up.is_set() and result.metrics is not None and result.metrics.restarts.value == 2
        assert result.unhealthy_reason == "the engine's process is not running."

    asyncio.run(main())


def test_old_deaths_do_not_count() -> None:
    async def main() -> None:
        result = supervised(LISTENS, max_restarts=1, restart_window=0.0)
        await result.start()
        watching = asyncio.create_task(result.watch())
        for restarts in (1, 2, 3):
            result.client.kill()
            await until(_restarted(result, restarts))
        watching.cancel()
        await result.client.stop()

    asyncio.run(main())


def test_a_hanging_engine_is_detected_and_replaced_without_blocking() -> None:
    """Not even with more submitted than its pipe holds."""

    async def main() -> None:
        result = supervised(LISTENS, step_timeout=0.6)
        await result.start()
        client = result.client
        assert client.process is not None and result.unhealthy_reason == ""
        first = client.process.pid
        os.kill(first, signal.SIGSTOP)
        await asyncio.sleep(0.8)
        assert result.unhealthy_reason == ""  # the client does not wait
        streams = [
            client.stream([[9] * 2000] * 8, SamplingParams()) for _ in range(40)
        ]  # would block forever if it waited
        assert client.alive
        await until(lambda: "no step was finished for 0.6 seconds" in result.unhealthy_reason)
        watching = asyncio.create_task(result.watch())
        for stream in streams:
            with pytest.raises(WorkerDiedError):
                async with asyncio.timeout(PATIENCE):
                    await stream.next()
        await until(lambda: not result.unhealthy_reason)
        assert client.process.pid != first and client.silent_seconds == 0
        watching.cancel()
        await client.stop()
        assert client.process.returncode is not None

    asyncio.run(main())


def test_an_engine_that_does_not_exit_is_killed() -> None:
    async def main() -> None:
        result = supervised("ready()\ntime.sleep(60)")
        await result.start()
        await result.client.stop(0.3)
        assert result.client.process is not None and result.client.process.returncode == -signal.SIGKILL

    asyncio.run(main())
