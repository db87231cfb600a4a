"""One replica: a Ray actor that passes requests to an engine in a subprocess, and tokens back.

Messages are JSON, as on the pipe to the engine. An actor whose engine died exits, so that Ray starts another: replicas
are replaced in one way, whichever process died.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple
from typing import Any

from smelt.errors import RequestError
from smelt.serve.engine.request import Tenant
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.worker.client import EngineClient, TokenStream, WorkerDiedError
from smelt.serve.worker.messages import SubmitRequest, decode

CHECK_SECONDS = 0.5  # between two checks of the engine
EXIT_DELAY = 0.2  # seconds for pending requests to get their error before the actor exits


class Replica:
    """Deployed by `smelt.serve.cluster.ray_serve`; Ray creates it, calls it and checks its health."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, model: str, options: dict[str, Any], step_timeout: float, heartbeat_timeout: float, rate: float,
        local: bool,
    ) -> None:  # fmt: skip
        if local:
            _listen_on_loopback_only()
        self._timeouts, self._rate = (step_timeout, heartbeat_timeout), rate
        self._streams: dict[str, TokenStream] = {}
        self._client = EngineClient(model, **options)
        await self._client.start()
        self._ending = asyncio.create_task(self._exit_with_engine())

    async def generate(self, message: str) -> AsyncGenerator[str, None]:
        """Stream the tokens of one prompt's answers; they are aborted when the caller stops reading."""
        request = decode(message)
        assert isinstance(request, SubmitRequest)
        try:
            stream = self._client.stream(
                [request.prompt], SamplingParams.from_json(request.sampling), priority=request.priority,
                salt=bytes.fromhex(request.salt), adapter=request.adapter,
                tenant=Tenant(request.tenant, request.weight),
            )  # fmt: skip
        except WorkerDiedError:
            yield json.dumps({"died": True})
            return
        self._streams[request.request_id] = stream
        try:
            while events := await stream.next():
                yield json.dumps({**self._status(), "events": [astuple(event) for event in events]})
                await asyncio.sleep(
                    len(self._streams) / self._rate
                )  # the next message has all tokens sampled meanwhile
        except RequestError as error:
            yield json.dumps({"rejected": str(error)})
        except WorkerDiedError:
            yield json.dumps({"died": True})
        finally:
            self._streams.pop(request.request_id, None)
            stream.close()

    async def poll(self, aborted: Sequence[tuple[str, int]]) -> str:
        """Abort these samples and return the state."""
        for request_id, sample in aborted:
            if request_id in self._streams:
                self._streams[request_id].abort(sample)
        process = self._client.process
        return json.dumps({
            **self._status(), "engine": None if self._client.engine is None else asdict(self._client.engine),
            "machine": socket.gethostname(), "process": os.getpid(),
            "worker": process.pid if process is not None else None,
        })  # fmt: skip

    async def check_health(self) -> None:
        """Raise if unhealthy; Ray calls this and replaces such a replica."""
        if not self._client.alive:
            raise WorkerDiedError("the engine's process is not running.")
        if reason := self._client.hang_reason(*self._timeouts):
            raise WorkerDiedError(reason)

    def _status(self) -> dict[str, Any]:
        return {"replica": _name(), "now": time.monotonic(), "state": self._client.state}

    async def _exit_with_engine(self) -> None:
        while not self._client.lost.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._client.lost.wait(), CHECK_SECONDS)
            if self._client.hang_reason(*self._timeouts):
                self._client.kill()
        await asyncio.sleep(EXIT_DELAY)
        os._exit(1)


def _name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _listen_on_loopback_only() -> None:
    """Close the gRPC port that Ray Serve opens at every replica, on all addresses and without a setting for it.

    If Ray has changed and the patched function is missing, the replica fails to start: better than an open port.
    """
    from ray.serve._private import replica

    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: add_port(server, "127.0.0.1:0")
