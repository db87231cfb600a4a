"""Supervise the replicas: Ray restarts them, and after too many deaths the server gives up."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from smelt.serve.cluster.client import ClusterClient
from smelt.serve.cluster.placement import Placement
from smelt.serve.cluster.ray_serve import RayServe
from smelt.serve.server.settings import ServerLimits, ServerSettings
from smelt.serve.server.supervisor import CHECK_SECONDS, EngineSupervisor
from smelt.serve.worker.client import Observer

logger = logging.getLogger(__name__)


class ClusterSupervisor(EngineSupervisor):
    """Supervise all replicas together."""

    client: ClusterClient

    def __init__(self, client: ClusterClient, limits: ServerLimits, replicas: int) -> None:
        super().__init__(client, limits)
        self._allowed = limits.max_restarts * replicas

    @property
    def unhealthy_reason(self) -> str:
        return super().unhealthy_reason if self.client.alive else "no replica is running."

    async def watch(self) -> None:
        while not self.given_up.is_set():
            for name in await self.client.poll():
                self._on_replica_lost(name)
            await asyncio.sleep(CHECK_SECONDS)

    def _on_replica_lost(self, name: str) -> None:
        now = time.monotonic()
        self._restarts.append(now)
        while now - self._restarts[0] > self.limits.restart_window:
            self._restarts.popleft()
        if len(self._restarts) > self._allowed:
            logger.error("replica %s died after %d others; giving up", name, self._allowed)
            self.given_up.set()
            return
        logger.error("replica %s died; Ray starts another (%d of %d)", name, len(self._restarts), self._allowed)
        if self.metrics is not None:
            self.metrics.restarts.inc()


def supervise_replicas(
    placement: Placement, settings: ServerSettings, observe: Observer, options: dict[str, Any]
) -> ClusterSupervisor:
    """Run the engines as Ray Serve replicas instead of in a subprocess."""
    client = ClusterClient(
        settings.model, RayServe(placement), step_timeout=settings.limits.step_timeout,
        heartbeat_timeout=settings.limits.heartbeat_timeout, observe=observe, device=settings.device, **options,
    )  # fmt: skip
    return ClusterSupervisor(client, settings.limits, placement.replicas)
