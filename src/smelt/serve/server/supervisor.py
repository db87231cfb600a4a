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


class EngineSupervisor:
    """Supervise one engine process. `engine` stays known while it restarts."""

    def __init__(self, client: EngineClient, limits: ServerLimits) -> None:
        self.client, self.limits = client, limits
        self.engine: EngineReady | None = None
        self.metrics: ServerMetrics | None = None
        self.given_up = asyncio.Event()
        self._restarts: deque[float] = deque()

    async def start(self) -> None:
        await self.client.start()
        self.engine = self.client.engine

    @property
    def unhealthy_reason(self) -> str:
        """Why nothing can be generated now; empty if healthy."""
        if not self.client.alive:
            return "the engine's process is not running."
        if self.client.silent_seconds > self.limits.step_timeout:
            return f"requests wait, and no step was finished for {self.limits.step_timeout:g} seconds."
        return ""

    async def watch(self) -> None:
        """Supervise until cancelled or given up."""
        while not self.given_up.is_set():
            try:
                await asyncio.wait_for(self.client.lost.wait(), CHECK_SECONDS)
            except TimeoutError:
                if self.client.silent_seconds > self.limits.step_timeout + CHECK_SECONDS:
                    logger.error("the engine finished no step for %g seconds; killing it", self.limits.step_timeout)
                    self.client.kill()
                continue
            if self.metrics is not None:
                self.metrics.reset_engine_state()
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
