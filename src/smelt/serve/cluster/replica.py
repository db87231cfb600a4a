"""One replica: an engine in its own process beside a Ray actor, which hands requests in and events out.

What comes in and what goes out is JSON, as on the pipe to the engine. An actor whose engine has died ends, so that
Ray starts another: there is one way in which replicas come back, whatever it was that died.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import astuple
from typing import Any

from smelt.errors import RequestError
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.worker.client import EngineClient, Stream, WorkerDiedError

FAREWELL = 0.2  # seconds in which those who wait are told, before the actor ends


class Replica:
    """Deployed by `smelt.serve.cluster.ray_serve`; Ray makes it, calls it and looks after its health."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, model: str, options: dict[str, Any], silence_seconds: float, rate: float, local: bool
    ) -> None:
        if local:
            _listen_on_loopback_only()
        self._silence, self._rate = silence_seconds, rate
        self._streams: dict[str, Stream] = {}
        self._client = EngineClient(model, **options)
        await self._client.start()
        self._ending = asyncio.create_task(self._end_with_the_engine())

    async def generate(self, message: str) -> AsyncGenerator[str, None]:
        """The events of one prompt's answers. Whoever stops reading aborts them."""
        asked = json.loads(message)
        try:
            stream = self._client.stream(
                [asked["prompt"]], SamplingParams.from_json(asked["sampling"]), priority=asked["priority"],
                salt=bytes.fromhex(asked["salt"]), adapter=asked["adapter"],
            )  # fmt: skip
        except WorkerDiedError:
            yield json.dumps({"died": True})
            return
        self._streams[asked["name"]] = stream
        try:
            while events := await stream.next():
                yield json.dumps({**self._seen(), "events": [astuple(event) for event in events]})
                await asyncio.sleep(len(self._streams) / self._rate)  # the next message holds all that comes meanwhile
        except RequestError as error:
            yield json.dumps({"refused": str(error)})
        except WorkerDiedError:
            yield json.dumps({"died": True})
        finally:
            self._streams.pop(asked["name"], None)
            stream.close()

    async def look(self, aborted: Sequence[tuple[str, int]]) -> str:
        """How it goes here. Answers that nobody wants any longer are told on this occasion."""
        for name, answer in aborted:
            if name in self._streams:
                self._streams[name].end(answer)
        process = self._client.process
        return json.dumps({
            **self._seen(), "facts": self._client.facts, "machine": socket.gethostname(), "process": os.getpid(),
            "worker": process.pid if process is not None else None,
        })  # fmt: skip

    async def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that raises."""
        if not self._client.alive:
            raise WorkerDiedError("the engine's process is not running.")
        if self._client.silent_seconds > self._silence:
            raise WorkerDiedError(f"no step was finished for {self._silence:g} seconds.")

    def _seen(self) -> dict[str, Any]:
        return {"replica": _name(), "now": time.monotonic(), "state": self._client.state}

    async def _end_with_the_engine(self) -> None:
        await self._client.lost.wait()
        await asyncio.sleep(FAREWELL)
        os._exit(1)


def _name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _listen_on_loopback_only() -> None:
    """Ray Serve opens a port at every replica for calls that we do not use, on all addresses whatever the node's own
    is, and has no setting for it. Where this function is missing Ray has changed: better no replica than an open port.
    """
    from ray.serve._private import replica

    opened = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: opened(server, "127.0.0.1:0")
