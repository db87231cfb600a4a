"""Engines that hang: stopped by a signal, or in a step that never returns; and long steps, which are not hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from smelt.serve.engine import step_timer
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.step_timer import ALLOWANCE, SLACK, StepTimer
from smelt.serve.server.settings import ServerLimits
from smelt.serve.server.supervisor import EngineSupervisor
from smelt.serve.worker.client import EngineClient, WorkerDiedError
from smelt.subprocesses import python_command
from tests.serve.server_process import PATIENCE, Server, start
from tests.serve.test_lifecycle import LONG, Reader
from tests.serve.test_supervisor import LISTENS, make_supervisor, until

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

# The real worker with a runner whose steps take 0.05 seconds per token, outside of the interpreter. The step of a
# prompt that begins with 13 never returns.
SLOW_WORKER = """
import sys, time
from smelt.serve.engine import step_timer
from smelt.serve.engine.runner import {runner}
from smelt.serve.worker import loop
step_timer.ALLOWANCE = 1.0
launch = {runner}.launch
def slow_launch(self, batch):
    time.sleep(1000 if any(chunk.request.prompt[0] == 13 for chunk in batch.chunks) else 0.05 * batch.tokens)
    return launch(self, batch)
{runner}.launch = slow_launch
loop.main()
"""


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def run_step(timer: StepTimer, clock: Clock, work: float, seconds: float) -> None:
    timer.begin()
    timer.add_work(work)
    clock.now += seconds
    timer.end()


def limit_of(timer: StepTimer, work: float) -> float | None:
    timer.begin()
    timer.add_work(work)
    return timer.limit


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(step_timer, "time", clock)
    return clock


def test_the_limit_of_a_step_follows_from_the_steps_before(clock: Clock) -> None:
    timer = StepTimer(compiles_on_first_use=False)
    timer.begin()
    assert timer.limit == ALLOWANCE, "scheduling takes no time"
    assert limit_of(timer, 1) is None, "nothing has run yet"
    run_step(timer, clock, 1, 0.5)
    run_step(timer, clock, 64, 4.0)
    assert limit_of(timer, 1) == ALLOWANCE + SLACK * 0.5
    assert limit_of(timer, 8) == ALLOWANCE + SLACK * 4.0, "no longer than a larger step"
    assert limit_of(timer, 2048) == ALLOWANCE + SLACK * 4.0 * 2048 / 64 * 2, "no longer than 2 x 32 smaller steps"
    for _ in range(200):
        run_step(timer, clock, 1, 0.1)
    assert limit_of(timer, 1) == pytest.approx(ALLOWANCE + SLACK * 0.1), "one slow step is forgotten"


def test_a_step_that_may_compile_has_no_limit_of_its_own(clock: Clock) -> None:
    timer = StepTimer(compiles_on_first_use=True)
    run_step(timer, clock, 1, 0.5)
    assert limit_of(timer, 1) is not None and limit_of(timer, 64) is None


def test_the_time_of_the_current_step(clock: Clock) -> None:
    timer = StepTimer(compiles_on_first_use=False)
    assert timer.seconds == 0
    timer.begin()
    clock.now += 3
    assert timer.seconds == 3
    timer.end()
    assert timer.seconds == 0 and limit_of(timer, 1) is None, "a step without work measures nothing"


def test_a_step_that_never_returns_is_noticed_and_a_long_one_finishes(model_folder: Path) -> None:
    from smelt.models.model import Model
    from smelt.serve.engine.engine import Engine
    from tests.serve.server_process import language_model

    runner = type(Engine(Model(language_model()), kv_cache_bytes=10**6).runner)

    async def main() -> None:
        client = EngineClient(str(model_folder), kv_cache_bytes=10**7)
        script = SLOW_WORKER.format(runner=runner.__name__).replace("smelt.serve.engine.runner", runner.__module__)
        client.command = tuple(python_command("-c", script))  # type: ignore[assignment]
        supervisor = EngineSupervisor(client, ServerLimits())
        await supervisor.start()
        watching = asyncio.create_task(supervisor.watch())
        first = client.process
        stream = client.stream([[7] * 60], GREEDY)  # its first step takes 3 seconds, longer than the allowance
        async with asyncio.timeout(PATIENCE):
            tokens = [event.token for _ in range(4) for event in await stream.next()]
        assert len(tokens) == 4 and client.process is first
        stream.close()
        began = time.monotonic()
        stream = client.stream([[13, 7]], GREEDY)
        with pytest.raises(WorkerDiedError):
            async with asyncio.timeout(PATIENCE):
                await stream.next()
        assert time.monotonic() - began < ALLOWANCE  # of real engines; that of this one is shorter
        await until(lambda: not supervisor.unhealthy_reason)
        assert client.process is not first
        watching.cancel()
        await client.stop()

    asyncio.run(main())


def _resources(server: Server) -> tuple[int, int]:
    """Return the threads and open files of the server's process."""
    folder = Path(f"/proc/{server.process.pid}")
    return len([*(folder / "task").iterdir()]), len([*(folder / "fd").iterdir()])


def test_a_stopped_process_is_replaced_within_10_seconds_and_restarts_leave_nothing(
    model_folder: Path, tmp_path: Path
) -> None:
    server = start(model_folder, tmp_path, "--kv-cache-gib", "0.02")
    try:
        server.complete()
        before = _resources(server)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            stopped = server.state()["worker"]
            stream = Reader(server, {**LONG, "max_tokens": 1500, "n": 4, "stream": True})
            assert stream.begun.wait(PATIENCE)
            began = time.monotonic()
            os.kill(stopped, number)
            stream.read()
            assert time.monotonic() - began < 10, "10 seconds after the last step"
            assert stream.error["code"] == "engine_died"
            assert server.get("/health").status_code == 503
            server.wait_until(lambda state, old=stopped: state["worker"] != old and not state["unhealthy_reason"])
            assert server.get("/health").status_code == 200
            assert not Path(f"/proc/{stopped}").exists()
        server.complete()
        deadline = time.monotonic() + 20
        while any(now > then for now, then in zip(_resources(server), before, strict=True)):
            assert time.monotonic() < deadline, (before, _resources(server))  # a connection may be closing
            time.sleep(0.1)
        assert "gave no sign of life" in server.log.read_text()
        assert server.end() == 0
    finally:
        if server.process.poll() is None:
            server.process.kill()


def test_three_restarts_leave_no_thread_and_no_file() -> None:
    async def main() -> None:
        supervisor = make_supervisor(LISTENS, max_restarts=9)
        await supervisor.start()
        before = threading.active_count(), len([*Path("/proc/self/fd").iterdir()])
        watching = asyncio.create_task(supervisor.watch())
        for _ in range(3):
            last = supervisor.client.process
            supervisor.client.kill()
            await until(lambda old=last: supervisor.client.process is not old and not supervisor.unhealthy_reason)
        await until(
            lambda: threading.active_count() <= before[0] and len([*Path("/proc/self/fd").iterdir()]) <= before[1], 20
        )
        watching.cancel()
        await supervisor.client.stop()

    asyncio.run(main())


@pytest.mark.slow
def test_an_idle_process_that_is_stopped_is_replaced_too(model_folder: Path) -> None:
    async def main() -> None:
        client = EngineClient(str(model_folder), kv_cache_bytes=10**6)
        supervisor = EngineSupervisor(client, ServerLimits(heartbeat_timeout=2.0))
        await supervisor.start()
        first = client.process
        assert first is not None
        watching = asyncio.create_task(supervisor.watch())
        await asyncio.sleep(3)
        assert client.process is first, "heartbeats arrive"
        os.kill(first.pid, signal.SIGSTOP)
        await until(lambda: client.process is not first and not supervisor.unhealthy_reason)
        watching.cancel()
        await client.stop()

    asyncio.run(main())


def test_an_engine_that_cannot_be_restarted_leaves_no_thread(tmp_path: Path) -> None:
    """Each attempt to start fails before the last one's pipe is closed."""
    started = tmp_path / "started"
    script = (
        f"import os\nif os.path.exists({str(started)!r}):\n"
        "    pipe.send(StartFailed('no memory.'))\n    time.sleep(0.2)\n    sys.exit(2)\n"
        f"open({str(started)!r}, 'w').close()\nready()\n"
    )

    async def main() -> None:
        before = threading.active_count()
        supervisor = make_supervisor(script, max_restarts=5)
        await supervisor.start()
        async with asyncio.timeout(PATIENCE):
            await supervisor.watch()
        assert supervisor.given_up.is_set()
        await until(lambda: threading.active_count() <= before, 20)

    asyncio.run(main())
