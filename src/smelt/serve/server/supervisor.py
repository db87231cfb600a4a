"""Keep the engine's process running: restart it when it dies, kill it when it hangs, give up after too many deaths."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from smelt.errors import SmeltError
from smelt.serve.server.metrics import ServerMetrics
from smelt.serve.server.settings import ServerLimits
from smelt.serve.worker.client import EngineClient
from smelt.serve.worker.messages import EngineReady

logger = logging.getLogger(__name__)
CHECK_SECONDS = 0.25  # between two checks of the process
LATE_SECONDS = 1.0  # between two checks: this process was stopped or starved


class EngineSupervisor:
    """Supervise one engine process. `engine` stays known while it restarts."""

    def __init__(self, client: EngineClient, limits: ServerLimits) -> None:
        self.client, self.limits = client, limits
        self.engine: EngineReady | None = None
        self.metrics: ServerMetrics | None = None
        self.given_up = asyncio.Event()
        self.asleep = False  # there is no process, and none is to be started
        self._restarts: deque[float] = deque()

    async def start(self) -> None:
        await self.client.start()
        self.engine = self.client.engine

    async def sleep(self) -> None:
        """End the process and with it free all its memory, until `wake_up`."""
        self.asleep = True
        await self.client.stop()

    async def wake_up(self) -> None:
        """Start the process again, which reads the weights anew."""
        if self.asleep:
            await self.client.start()
            self.asleep = False

    @property
    def unhealthy_reason(self) -> str:
        """Why nothing can be generated now; empty if healthy."""
        if self.asleep:
            return "the engine sleeps; POST /wake_up starts it."
        if not self.client.alive:
            return "the engine's process is not running."
        return self.client.hang_reason(self.limits.step_timeout, self.limits.heartbeat_timeout)

    async def watch(self) -> None:
        """Supervise until cancelled or given up."""
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
