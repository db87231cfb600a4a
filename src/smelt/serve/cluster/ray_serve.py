"""The lifecycle of one Ray Serve application, on a local Ray or a running cluster. A Ray started here leaves neither
processes nor files behind."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from smelt.errors import ResourceError, SmeltError
from smelt.ray_start import join_cluster, restore_signal_handlers, set_ray_environment, start_local_ray
from smelt.serve.cluster.placement import Placement

T = TypeVar("T")
logger = logging.getLogger(__name__)
POLL_SECONDS = 0.25  # between polls while replicas start
HEALTH_PERIOD, HEALTH_TIMEOUT = 1.0, 10.0  # seconds
STOP_SECONDS = 5.0

SERVE_ENV = {
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Answers take seconds: query queue lengths for every request instead of caching them for ten seconds.
    "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S": "0",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "0.5",
}


class RayServe:
    """One application. All blocking Ray calls run in one thread that lives as long as this object: Ray ties its
    processes to the thread that started them."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.local = not placement.ray_address
        self.name = f"smelt-{uuid.uuid4().hex[:8]}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._folder: Path | None = None
        self._started = False

    async def start(self, target: type, arguments: dict[str, Any], requests: int) -> Any:
        """Start all replicas and return their handle. `requests` is the limit of ongoing requests per replica."""
        await self._run(self._connect)
        restore_signal_handlers()
        handle = await self._run(partial(self._deploy, target, arguments, requests))
        while not await self._run(self._ready):
            await asyncio.sleep(POLL_SECONDS)
        return handle

    async def stop(self) -> None:
        if self._started:
            await self._run(self._disconnect)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _connect(self) -> None:
        os.environ.update(SERVE_ENV)
        set_ray_environment(local=self.local)
        import ray.serve  # noqa: F401  (it sets up its loggers, which are silenced then)

        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._started = True
        if self.local:
            self._folder = Path(tempfile.mkdtemp(prefix="smelt-ray-"))
            min_cpus = self.placement.cpus * self.placement.replicas
            start_local_ray(str(self._folder), num_cpus=max(os.cpu_count() or 1, int(min_cpus + 0.999)))
        else:
            join_cluster(self.placement.ray_address)
        self._check_resources()

    def _check_resources(self) -> None:
        import ray

        available, placement = ray.cluster_resources(), self.placement
        for resource, amount in (("CPU", placement.cpus), ("GPU", placement.gpus)):
            if amount * placement.replicas > available.get(resource, 0):
                raise ResourceError(
                    f"{placement.replicas} replicas with {amount:g} {resource}s each were requested; Ray has "
                    f"{available.get(resource, 0):g} here. Request fewer replicas, or less with --replica-cpus."
                )

    def _deploy(self, target: type, arguments: dict[str, Any], requests: int) -> Any:
        from ray import serve

        quiet = {"log_level": "ERROR", "enable_access_log": False}
        serve.start(proxy_location="Disabled", logging_config=quiet)
        placement = self.placement
        deployment = serve.deployment(target).options(
            num_replicas=placement.replicas, max_ongoing_requests=requests, max_constructor_retry_count=1,
            health_check_period_s=HEALTH_PERIOD, health_check_timeout_s=HEALTH_TIMEOUT,
            graceful_shutdown_timeout_s=STOP_SECONDS, logging_config=quiet,
            ray_actor_options={"num_cpus": placement.cpus, "num_gpus": placement.gpus},
        )  # fmt: skip
        application = serve.RunTarget(deployment.bind(**arguments), self.name, route_prefix=None)
        (handle,) = serve.run_many([application], wait_for_applications_running=False)
        return handle

    def _ready(self) -> bool:
        from ray import serve

        application = serve.status().applications.get(self.name)
        if application is None or application.status == "DEPLOYING":
            return False
        if application.status == "RUNNING":
            return True
        messages = [application.message, *(deployment.message for deployment in application.deployments.values())]
        raise SmeltError(_error_message("\n".join(messages)))

    def _disconnect(self) -> None:
        import ray

        try:
            if ray.is_initialized() and not self.local:
                from ray import serve

                serve.delete(self.name)
        finally:
            ray.shutdown()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)


def _error_message(report: str) -> str:
    """Extract the message of a Smelt error in a replica from Ray's report."""
    for line in reversed(report.splitlines()):
        name, colon, message = line.strip().partition(": ")
        if colon and name.startswith("smelt.errors."):
            return message
    return "no replica could be started; see Ray's logs (RAY_SERVE_LOG_TO_STDERR=1 shows them)."
