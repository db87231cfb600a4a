"""The client of all replicas, used like that of one engine: Ray chooses a replica for each prompt.

A prompt whose replica died before its first token is sent to another. The counters of all replicas are summed; those of
lost replicas stay in the sums, so that no counter ever decreases.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smelt.errors import ModelError, RequestError
from smelt.serve.cluster.ray_serve import RayServe
from smelt.serve.cluster.replica import Replica
from smelt.serve.worker.client import EngineClient, Observer, WorkerDiedError, token_event
from smelt.serve.worker.messages import AbortSample, EngineReady, SubmitRequest, WorkerMessage, encode

logger = logging.getLogger(__name__)
MAX_ATTEMPTS = 4  # to send a prompt to a replica before it counts as lost
RETRY_SECONDS = 0.4  # between attempts: a replica whose engine died is idle, so Ray prefers it until it has ended
LOST_SECONDS = 1.0  # without an answer, after which a replica counts as lost
POLL_TIMEOUT = 5.0
MESSAGE_RATE = 400.0  # messages per second over all replicas; each costs this process about a millisecond
GAUGES = (
    "running",
    "waiting",
    "blocks",
    "blocks_used",
    "blocks_carried",
    "kv_bytes",
    "kv_bytes_used",
    "kv_tokens",
)  # of an engine's state; the rest are counters


class ClusterClient(EngineClient):
    """Used like the client of a single engine."""

    def __init__(
        self, source: str, serve: RayServe, *, step_timeout: float, heartbeat_timeout: float,
        observe: Observer | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(source, observe=observe, **options)
        self._serve, self._step_timeout, self._heartbeat_timeout = serve, step_timeout, heartbeat_timeout
        self._handle: Any = None
        self._calls: dict[str, asyncio.Task[None]] = {}  # by request id: those with unfinished answers
        self._tasks: set[asyncio.Task[None]] = set()
        self._aborted: list[tuple[str, int]] = []
        self._engines: dict[str, EngineReady] = {}  # by replica
        self._clocks: dict[str, float] = {}  # per replica: our clock minus its clock
        self._latest: dict[str, float] = {}  # per replica: time of its newest state, by its clock
        self._answered: dict[str, float] = {}  # per replica: when its last answer arrived
        self._lost_counts: dict[str, dict[str, int]] = {}  # counters of lost replicas

    @property
    def alive(self) -> bool:
        return self.engine is not None and bool(self.replicas)

    def hang_reason(self, step_timeout: float, heartbeat_timeout: float) -> str:
        """Each replica watches its own engine; together they hang if requests wait and none finishes a step."""
        if self.silent_seconds > step_timeout:
            return f"requests wait, and no step was finished for {step_timeout:g} seconds."
        return ""

    async def start(self) -> None:
        folder = await asyncio.to_thread(_model_folder, self.source)
        adapters = {name: str(Path(path).absolute()) for name, path in self.options.get("adapters", {}).items()}
        arguments = {
            "model": str(Path(self.source).absolute()) if Path(self.source).exists() else self.source,
            "options": {**self.options, "adapters": adapters},
            "step_timeout": self._step_timeout,
            "heartbeat_timeout": self._heartbeat_timeout,
            "rate": MESSAGE_RATE / self._serve.placement.replicas,
            "local": self._serve.local,
        }
        self._handle = await self._serve.start(Replica, arguments, self.options["max_queued"])
        while len(self._engines) < self._serve.placement.replicas:
            await self.poll()
        engines = list(self._engines.values())
        self.engine = replace(
            engines[0],
            folder=folder,
            blocks=min(engine.blocks for engine in engines),
            max_request_tokens=min(engine.max_request_tokens for engine in engines),
        )

    async def poll(self) -> list[str]:
        """Poll the state of all replicas; return the names of those lost since."""
        aborted = list(self._aborted)
        try:
            answers = self._handle.broadcast("poll", [sample for sample in aborted if sample[0] in self._calls])
            replies = await answers.results_async(timeout_s=POLL_TIMEOUT, return_exceptions=True)
        except TimeoutError:  # Ray detects the one that hangs; nothing is known about the others meanwhile
            return []
        except Exception:  # Ray knows of no replica
            replies = []
        del self._aborted[: len(aborted)]
        for reply in replies:
            if isinstance(reply, str):
                self._update_replica(json.loads(reply))
        deadline = time.monotonic() - LOST_SECONDS
        lost = [name for name in self.replicas if self._answered[name] < deadline]
        for name in lost:
            counted = self.replicas.pop(name)["state"]
            self._lost_counts[name] = {key: value for key, value in counted.items() if key not in GAUGES}
        self._sum_states()
        return lost

    def forget(self, request_ids: Sequence[str]) -> None:
        super().forget(request_ids)
        for request_id in request_ids:
            call = self._calls.pop(request_id, None)
            if call is not None:
                call.cancel()

    async def stop(self, timeout: float = 5.0) -> None:
        for task in list(self._tasks):
            task.cancel()
        pids = [replica[key] for replica in self.replicas.values() for key in ("process", "worker") if key in replica]
        await self._serve.stop()
        deadline = time.monotonic() + max(timeout, 5.0)
        while self._serve.local and any(Path(f"/proc/{pid}").exists() for pid in pids):
            if time.monotonic() > deadline:
                logger.error("a replica's process has not ended")
                return
            await asyncio.sleep(0.05)

    def _send(self, message: WorkerMessage) -> None:
        if isinstance(message, SubmitRequest):
            task = asyncio.create_task(self._follow(message))
            self._calls[message.request_id] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, AbortSample):  # when all samples are aborted, the call is cancelled
            self._aborted.append((message.request_id, message.sample))

    async def _follow(self, message: SubmitRequest) -> None:
        """Read the tokens of one prompt from a replica, or from another if it fails before the first token."""
        request_id, unfinished, started_streaming = message.request_id, message.sampling["n"], False
        content = encode(message).decode()
        for _ in range(MAX_ATTEMPTS):
            try:
                answers = self._handle.options(stream=True).generate.remote(content)
                async for answer in answers:
                    reply = json.loads(answer)
                    if "died" in reply:
                        break
                    if "rejected" in reply:
                        self._push(request_id, RequestError(reply["rejected"]))
                        return
                    started_streaming = True
                    unfinished -= sum(1 for event in reply["events"] if event[3])
                    if unfinished == 0:
                        self._calls.pop(request_id, None)  # it ends by itself
                    self._update_replica(reply)
                    self._push_events(request_id, reply)
                else:
                    return
            except asyncio.CancelledError:
                answers.cancel()
                raise
            except Exception as error:  # any of Ray's errors means that this replica does not answer
                logger.warning("a replica did not finish a request: %s", type(error).__name__)
            if started_streaming:
                break
            await asyncio.sleep(RETRY_SECONDS)
        self._push(request_id, WorkerDiedError("the replica's engine ended; the request is lost, send it again."))

    def _push_events(self, request_id: str, reply: dict[str, Any]) -> None:
        clock = self._clocks[reply["replica"]]
        for sample, *event in reply["events"]:
            if request_id not in self._streams:
                return
            received = token_event(self._streams[request_id][1] + sample, event)
            self._push(request_id, replace(received, started=received.started + clock))
        self._sum_states()

    def _update_replica(self, reply: dict[str, Any]) -> None:
        """Update a replica's state from one of its messages."""
        name, now = reply["replica"], time.monotonic()
        known = self.replicas.get(name, {})
        self._clocks[name] = min(self._clocks.get(name, math.inf), now - reply["now"])  # from the fastest message
        self._answered[name] = now
        self._lost_counts.pop(name, None)
        if reply["now"] < self._latest.get(name, -math.inf):  # messages of different streams can overtake each other
            return
        self._latest[name] = reply["now"]
        if reply["state"] != known.get("state"):
            self._last_step = now
        if reply.get("engine") is not None:
            self._engines[name] = EngineReady(**reply["engine"])
        status = {key: reply[key] for key in ("machine", "process", "worker", "state") if key in reply}
        self.replicas[name] = known | status

    def _sum_states(self) -> None:
        states = [replica["state"] for replica in self.replicas.values()]
        summands = [dict.fromkeys(GAUGES, 0), *states, *self._lost_counts.values()]
        self.state = {key: sum(state.get(key, 0) for state in summands) for key in set().union(*summands)}
        if self._observe is not None and len(summands) > 1:
            self._observe(self.state)


def _model_folder(source: str) -> str:
    """Return the model's folder on this machine; refuse early what no replica could serve."""
    from smelt.models.load import resolve, skeleton
    from smelt.models.model import Model

    folder = resolve(source)
    task = Model(skeleton(str(folder))).task
    if task != "language":
        raise ModelError(f"{source} is for {task}; replicas serve language models only. Serve it without --replicas.")
    return str(folder)
