"""Keeps the engine's process running: starts it again when it dies, kills it when it hangs, gives up in the end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any

from smelt.errors import SmeltError
from smelt.serve.server.metrics import Meters
from smelt.serve.server.settings import ServerLimits
from smelt.serve.worker.client import EngineClient

log = logging.getLogger("smelt.serve")
TICK = 0.25  # seconds between two looks at the process


class Supervisor:
    """One engine process at a time. `facts` stay known while it is started again."""

    def __init__(self, client: EngineClient, limits: ServerLimits) -> None:
        self.client, self.limits = client, limits
        self.facts: dict[str, Any] = {}
        self.meters: Meters | None = None
        self.given_up = asyncio.Event()
        self._restarts: deque[float] = deque()

    async def start(self) -> None:
        await self.client.start()
        self.facts = dict(self.client.facts)

    @property
    def trouble(self) -> str:
        """Why nothing is generated; empty when all is well."""
        if not self.client.alive:
            return "the engine's process is not running."
        if self.client.silent_seconds > self.limits.step_timeout:
            return f"requests wait, and no step was finished for {self.limits.step_timeout:g} seconds."
        return ""

    async def watch(self) -> None:
        """Until cancelled, or until it has died too often."""
        while not self.given_up.is_set():
            try:
                await asyncio.wait_for(self.client.lost.wait(), TICK)
            except TimeoutError:
                if self.client.silent_seconds > self.limits.step_timeout + TICK:
                    log.error("the engine finished no step for %g seconds; killing it", self.limits.step_timeout)
                    self.client.kill()
                continue
            if self.meters is not None:
                self.meters.engine_lost()
            await self._start_again()

    async def _start_again(self) -> None:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self.limits.restart_window:
            self._restarts.popleft()
        if len(self._restarts) >= self.limits.max_restarts:
            log.error("the engine's process died once more after %d restarts; giving up", len(self._restarts))
            self.given_up.set()
            return
        self._restarts.append(now)
        log.error(
            "the engine's process died; starting it again (%d of %d)", len(self._restarts), self.limits.max_restarts
        )
        if self.meters is not None:
            self.meters.restarts.add()
        try:
            await self.client.start()
            log.warning("the engine runs again")
        except SmeltError as error:
            log.error("it could not be started: %s", error)
            self.client.lost.set()
