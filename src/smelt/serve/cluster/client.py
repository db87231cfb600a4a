"""The server's side of all replicas, as if they were one engine: each prompt goes to one of them, by Ray's choice.

A prompt whose replica died before its first token is given to another. Counts of all replicas are added up; those of
replicas that have gone stay in the sums, so that no counter ever falls.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from smelt.errors import ModelError, RequestError
from smelt.serve.cluster.ray_serve import RayServe
from smelt.serve.cluster.replica import Replica
from smelt.serve.worker.client import EngineClient, Message, Observer, TokenEvent, WorkerDiedError

log = logging.getLogger("smelt.serve")
ATTEMPTS = 4  # times that a prompt is given to a replica before it counts as lost
PAUSE_SECONDS = 0.4  # between two: a replica whose engine died is idle, hence Ray's first choice until it has ended
MISSED_SECONDS = 1.0  # without an answer of a replica: it has gone
LOOK_TIMEOUT = 5.0
MESSAGE_RATE = 400.0  # messages a second from all replicas together; each costs this process about a millisecond
GAUGES = ("running", "waiting", "blocks", "blocks_used", "blocks_carried")  # of an engine; all else is counted


class ClusterClient(EngineClient):
    """Used like the client of one engine."""

    def __init__(
        self, source: str, serve: RayServe, *, silence_seconds: float, observe: Observer | None = None, **options: Any
    ) -> None:
        super().__init__(source, observe=observe, **options)
        self._serve, self._silence = serve, silence_seconds
        self._handle: Any = None
        self._calls: dict[str, asyncio.Task[None]] = {}  # by name: those whose answers have not all ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._aborted: list[tuple[str, int]] = []
        self._facts: dict[str, Message] = {}
        self._clocks: dict[str, float] = {}  # of each replica: our clock minus its clock
        self._latest: dict[str, float] = {}  # when each sent the state that is known, by its clock
        self._answered: dict[str, float] = {}  # when each was last heard of
        self._gone: dict[str, dict[str, int]] = {}  # what those had counted that are no more

    @property
    def alive(self) -> bool:
        return bool(self.facts) and bool(self.replicas)

    async def start(self) -> None:
        folder = await asyncio.to_thread(_checked, self.source)
        adapters = {name: str(Path(each).absolute()) for name, each in self.options.get("adapters", {}).items()}
        arguments = {
            "model": str(Path(self.source).absolute()) if Path(self.source).exists() else self.source,
            "options": {**self.options, "adapters": adapters},
            "silence_seconds": self._silence,
            "rate": MESSAGE_RATE / self._serve.placement.replicas,
            "local": self._serve.local,
        }
        self._handle = await self._serve.start(Replica, arguments, self.options["max_queued"])
        while len(self._facts) < self._serve.placement.replicas:
            await self.look()
        every = list(self._facts.values())
        least = {name: min(facts[name] for facts in every) for name in ("blocks", "longest")}
        self.facts = {**every[0], "folder": folder, **least}

    async def look(self) -> list[str]:
        """Ask all replicas how they are: the names of those that have gone since."""
        aborted = list(self._aborted)
        try:
            answers = self._handle.broadcast("look", [each for each in aborted if each[0] in self._calls])
            found = await answers.results_async(timeout_s=LOOK_TIMEOUT, return_exceptions=True)
        except TimeoutError:  # one that hangs is Ray's to find; nothing is known about the others meanwhile
            return []
        except Exception:  # Ray knows of no replica
            found = []
        del self._aborted[: len(aborted)]
        for answer in found:
            if isinstance(answer, str):
                self._see(json.loads(answer))
        late = time.monotonic() - MISSED_SECONDS
        gone = [name for name in self.replicas if self._answered[name] < late]
        for name in gone:
            counted = self.replicas.pop(name)["state"]
            self._gone[name] = {key: value for key, value in counted.items() if key not in GAUGES}
        self._tell()
        return gone

    def forget(self, names: Sequence[str]) -> None:
        super().forget(names)
        for name in names:
            call = self._calls.pop(name, None)
            if call is not None:
                call.cancel()

    async def stop(self, seconds: float = 5.0) -> None:
        for task in list(self._tasks):
            task.cancel()
        processes = [each[kind] for each in self.replicas.values() for kind in ("process", "worker") if kind in each]
        await self._serve.stop()
        until = time.monotonic() + max(seconds, 5.0)
        while self._serve.local and any(Path(f"/proc/{pid}").exists() for pid in processes):
            if time.monotonic() > until:
                log.error("a replica's process has not ended")
                return
            await asyncio.sleep(0.05)

    def _send(self, message: Message) -> None:
        if message["kind"] == "submit":
            task = asyncio.create_task(self._follow(message["name"], message["sampling"]["n"], json.dumps(message)))
            self._calls[message["name"]] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif message["kind"] == "abort":  # of some samples; when none is wanted any longer the call is cancelled
            self._aborted.append((message["name"], message["sample"]))

    async def _follow(self, name: str, open_answers: int, message: str) -> None:
        """Read what one prompt's replica sends, or another one's if that fails before it has sent any token."""
        begun = False
        for _ in range(ATTEMPTS):
            try:
                answers = self._handle.options(stream=True).generate.remote(message)
                async for answer in answers:
                    told = json.loads(answer)
                    if "died" in told:
                        break
                    if "refused" in told:
                        self._give(name, RequestError(told["refused"]))
                        return
                    begun = True
                    open_answers -= sum(1 for event in told["events"] if event[3])
                    if open_answers == 0:
                        self._calls.pop(name, None)  # it ends by itself
                    self._see(told)
                    self._hear(name, told)
                else:
                    return
            except asyncio.CancelledError:
                answers.cancel()
                raise
            except Exception as error:  # of Ray's many, each means that this replica does not answer
                log.warning("a replica did not finish a request: %s", type(error).__name__)
            if begun:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        self._give(name, WorkerDiedError("the replica's engine ended; the request is lost, send it again."))

    def _hear(self, name: str, told: Message) -> None:
        clock = self._clocks[told["replica"]]
        for answer, token, logprobs, reason, cached, started in told["events"]:
            if name not in self._streams:
                return
            pairs = None if logprobs is None else (logprobs[0], [(pair[0], pair[1]) for pair in logprobs[1]])
            place = self._streams[name][1] + answer
            self._give(name, TokenEvent(place, token, pairs, reason, cached, started + clock))
        self._tell()

    def _see(self, told: Message) -> None:
        """Something came from a replica."""
        name, now = told["replica"], time.monotonic()
        known = self.replicas.get(name, {})
        self._clocks[name] = min(self._clocks.get(name, math.inf), now - told["now"])  # of the quickest message
        self._answered[name] = now
        self._gone.pop(name, None)
        if told["now"] < self._latest.get(name, -math.inf):  # messages of different streams overtake each other
            return
        self._latest[name] = told["now"]
        if told["state"] != known.get("state"):
            self._moved = now
        if "facts" in told:
            self._facts[name] = told["facts"]
        shown = {key: told[key] for key in ("machine", "process", "worker", "state") if key in told}
        self.replicas[name] = known | shown

    def _tell(self) -> None:
        """The sum of all states."""
        states = [each["state"] for each in self.replicas.values()]
        both = [dict.fromkeys(GAUGES, 0), *states, *self._gone.values()]
        self.state = {key: sum(state.get(key, 0) for state in both) for key in set().union(*both)}
        if self._observe is not None and len(both) > 1:
            self._observe(self.state)


def _checked(source: str) -> str:
    """Where the model lies on this machine; refuses early what no replica could serve."""
    from smelt.models.load import resolve, skeleton
    from smelt.models.model import Model

    folder = resolve(source)
    task = Model(skeleton(str(folder))).task
    if task != "language":
        raise ModelError(f"{source} is for {task}; replicas are for language models. Serve it without --replicas.")
    return str(folder)
