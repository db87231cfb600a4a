"""Keep the engine's process running: restart it when it dies, kill it when it hangs, give up after too many deaths."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping

from smelt.errors import RequestError, SmeltError
from smelt.serve.server.errors import ApiError
from smelt.serve.server.metrics import ServerMetrics
from smelt.serve.server.settings import ServerLimits
from smelt.serve.worker.client import EngineClient, EngineConnection, WorkerDiedError
from smelt.serve.worker.messages import EngineReady

logger = logging.getLogger(__name__)
CHECK_SECONDS = 0.25  # between two checks of the process
LATE_SECONDS = 1.0  # between two checks: this process was stopped or starved


class Supervisor(ABC):
    """Keep an engine available, and change it at run time. `engine` stays known while it restarts."""

    def __init__(self, client: EngineConnection, limits: ServerLimits) -> None:
        self.client, self.limits = client, limits
        self.engine: EngineReady | None = None
        self.given_up = asyncio.Event()

    async def start(self) -> None:
        await self.client.start()
        self.engine = self.client.engine

    @property
    def unhealthy_reason(self) -> str:
        """Why nothing can be generated now; empty if healthy."""
        if self.asleep:
            return "the engine sleeps; POST /wake_up starts it."
        if not self.client.alive:
            return "the engine's process is not running."
        return self.client.hang_reason(self.limits.step_timeout, self.limits.heartbeat_timeout)

    @property
    @abstractmethod
    def adapters(self) -> Mapping[str, str]:
        """LoRA adapters served now: folders by name."""

    @property
    @abstractmethod
    def asleep(self) -> bool:
        """Whether there is no process, and none is to be started."""

    @abstractmethod
    def count_in(self, metrics: ServerMetrics, num_admitted: Callable[[], int]) -> None:
        """Keep the engine's part of the metrics up to date; `num_admitted` is how many sequences run or wait."""

    @abstractmethod
    async def watch(self) -> None:
        """Supervise until cancelled or given up."""

    @abstractmethod
    async def load_adapter(self, name: str, folder: str) -> None:
        """Serve a LoRA adapter from now on."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Serve it no more; refused while requests use it."""

    @abstractmethod
    async def sleep(self) -> None:
        """End the process and with it free all its memory, until `wake_up`; refused while requests run."""

    @abstractmethod
    async def wake_up(self) -> None:
        """Start the process again, which reads the weights anew."""


class EngineSupervisor(Supervisor):
    """Supervise one engine process."""

    client: EngineClient

    def __init__(self, client: EngineClient, limits: ServerLimits, adapters: Mapping[str, str] | None = None) -> None:
        super().__init__(client, limits)
        self.metrics: ServerMetrics | None = None
        self._adapters, self._asleep = dict(adapters or {}), False
        self._changing = asyncio.Lock()  # held while adapters change or the engine goes to sleep
        self._num_admitted: Callable[[], int] = int
        self._restarts: deque[float] = deque()

    def count_in(self, metrics: ServerMetrics, num_admitted: Callable[[], int]) -> None:
        self.metrics, self._num_admitted = metrics, num_admitted
        metrics.update_engine_state(self.client.state)

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._adapters

    @property
    def asleep(self) -> bool:
        return self._asleep

    async def load_adapter(self, name: str, folder: str) -> None:
        async with self._changing:
            if name in self._adapters:
                raise ApiError(400, "an adapter of that name is served already; unload it first.", param="lora_name")
            try:
                await self.client.load_adapter(name, folder)
            except WorkerDiedError as error:
                raise _engine_down(error) from error
            except RequestError:
                raise
            except SmeltError as error:
                raise ApiError(400, str(error), param="lora_path") from error
            self._publish({**self._adapters, name: folder}, self._asleep)

    async def unload_adapter(self, name: str) -> None:
        async with self._changing:
            before = self._adapters
            if name not in before:
                message = "this server has no adapter of that name."
                raise ApiError(404, message, param="lora_name", code="model_not_found")
            others = {other: folder for other, folder in before.items() if other != name}
            self._publish(others, self._asleep)  # from now on no request can begin to use it
            try:
                await self.client.unload_adapter(name)
            except SmeltError as error:
                self._publish(before, self._asleep)
                if isinstance(error, WorkerDiedError):
                    raise _engine_down(error) from error
                raise ApiError(409, str(error), param="lora_name", code="adapter_in_use") from error

    async def sleep(self) -> None:
        async with self._changing:
            was_asleep = self._asleep
            self._publish(self._adapters, asleep=True)
            if self._num_admitted() and not was_asleep:
                self._publish(self._adapters, asleep=False)
                message = "requests are running; wait until they have ended before the engine sleeps."
                raise ApiError(409, message, code="engine_busy", headers={"retry-after": "5"})
            await self.client.stop()

    async def wake_up(self) -> None:
        async with self._changing:
            if not self._asleep:
                return
            try:
                await self.client.start()
            except SmeltError as error:
                raise ApiError(503, f"the engine could not be started: {error}", code="engine_down") from error
            self._publish(self._adapters, asleep=False)

    def _publish(self, adapters: dict[str, str], asleep: bool) -> None:
        self._adapters, self._asleep = adapters, asleep

    async def watch(self) -> None:
        was_late, checked = False, time.monotonic()
        while not self.given_up.is_set():
            try:
                await asyncio.wait_for(self.client.lost.wait(), CHECK_SECONDS)
            except TimeoutError:
                now = time.monotonic()
                # If this process itself did not run, messages of the engine may be waiting to be read: check again.
                was_late = now - checked > LATE_SECONDS and not was_late
                checked = now
                reason = (
                    "" if was_late else self.client.hang_reason(self.limits.step_timeout, self.limits.heartbeat_timeout)
                )
                if reason:
                    logger.error("the engine hangs, so it is killed: %s", reason)
                    self.client.kill()
                continue
            if self.metrics is not None:
                self.metrics.reset_engine_state()
            if self.asleep:
                await asyncio.sleep(CHECK_SECONDS)
                continue
            await self._restart()

    async def _restart(self) -> None:
        now, limit = time.monotonic(), self.limits.max_restarts
        while self._restarts and now - self._restarts[0] > self.limits.restart_window:
            self._restarts.popleft()
        if len(self._restarts) >= limit:
            logger.error("the engine's process died again after %d restarts; giving up", len(self._restarts))
            self.given_up.set()
            return
        self._restarts.append(now)
        logger.error("the engine's process died; restarting it (%d of %d)", len(self._restarts), limit)
        if self.metrics is not None:
            self.metrics.restarts.inc()
        try:
            await self.client.start()
            logger.info("the engine is running again")
        except SmeltError as error:
            logger.error("the engine could not be restarted: %s", error)
            self.client.lost.set()


def _engine_down(error: WorkerDiedError) -> ApiError:
    return ApiError(503, str(error), code="engine_down", headers={"retry-after": "5"})
