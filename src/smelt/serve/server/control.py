"""What the processes of a server tell each other, beside the engine's socket and their shared table.

The process that supervises the engine, and serves no HTTP itself, writes what is served to a file. The API processes
read it when it has changed, and call that process to change something. All files are in a folder that only the server's
user can open.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from smelt.errors import SmeltError
from smelt.files import write_atomically
from smelt.serve.server.errors import ApiError, as_api_error
from smelt.serve.server.metrics import ServerMetrics
from smelt.serve.server.settings import ServerLimits, ServerSettings
from smelt.serve.server.shared_table import SharedTable
from smelt.serve.server.supervisor import EngineSupervisor, Supervisor
from smelt.serve.worker.client import CONNECT_SECONDS, AttachedEngine, EngineClient

CONNECT_TIMEOUT = 5.0  # for the API processes to connect to an engine that was woken up
CALLS = ("load_adapter", "unload_adapter", "sleep", "wake_up")


class ServedStatus:
    """The adapters that are served, and whether the engine sleeps: written by one process, read by all.

    In return, each API process says whether it is connected to the engine and whether it accepts requests.
    """

    def __init__(self, folder: Path, table: SharedTable) -> None:
        self._path, self._version = folder / "status.json", table.allocate(1).common
        self._connected, self._serving = table.allocate(1), table.allocate(1)
        self._read_version = -1.0
        self._adapters: dict[str, str] = {}
        self._asleep = False

    def write(self, adapters: Mapping[str, str], asleep: bool) -> None:
        content = json.dumps({"adapters": dict(adapters), "asleep": asleep})
        write_atomically(self._path, lambda path: path.write_text(content))
        self._version[0] += 1

    def read(self) -> tuple[Mapping[str, str], bool]:
        version = self._version[0]
        if version != self._read_version:
            content = json.loads(self._path.read_bytes())
            self._adapters, self._asleep, self._read_version = content["adapters"], content["asleep"], version
        return self._adapters, self._asleep

    def set_connected(self, connected: bool) -> None:
        self._connected.own[0] = connected

    def set_serving(self) -> None:
        self._serving.own[0] = True

    @property
    def num_connected(self) -> int:
        return int(self._connected.total(0))

    @property
    def num_serving(self) -> int:
        return int(self._serving.total(0))

    def forget_process(self, row: int) -> None:
        self._connected.clear(row)
        self._serving.clear(row)


class PublishingSupervisor(EngineSupervisor):
    """Supervises the engine for the API processes, which call it through a socket."""

    def __init__(self, client: EngineClient, settings: ServerSettings, status: ServedStatus) -> None:
        super().__init__(client, settings.limits, settings.adapters)
        self._status, self._num_processes = status, settings.api_server_count
        status.write(settings.adapters, asleep=False)

    def _publish(self, adapters: dict[str, str], asleep: bool) -> None:
        super()._publish(adapters, asleep)
        self._status.write(adapters, asleep)

    async def wake_up(self) -> None:
        """Return when the API processes are connected too, so that the next request finds the engine."""
        await super().wake_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_TIMEOUT):
                while self._status.num_connected < self._num_processes:
                    await asyncio.sleep(CONNECT_SECONDS)

    async def listen(self, path: Path) -> asyncio.Server:
        return await asyncio.start_unix_server(self._answer, path)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Make one call for an API process; send the error response, or null."""
        name, arguments = json.loads(await reader.readline())
        assert name in CALLS
        try:
            await getattr(self, name)(*arguments)
            result = None
        except Exception as caught:
            error = as_api_error(caught)
            result = [error.status, error.message, error.param, error.code, error.headers]
        writer.write(json.dumps(result).encode() + b"\n")
        writer.close()


class AttachedSupervisor(Supervisor):
    """In an API process: keep it connected to the engine, which another process supervises."""

    client: AttachedEngine

    def __init__(self, folder: Path, status: ServedStatus, limits: ServerLimits) -> None:
        super().__init__(AttachedEngine(str(engine_socket(folder))), limits)
        self._control, self._status = control_socket(folder), status

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._status.read()[0]

    @property
    def asleep(self) -> bool:
        return self._status.read()[1]

    def count_in(self, metrics: ServerMetrics, num_admitted: Callable[[], int]) -> None:
        """The process that supervises the engine does that."""

    async def start(self) -> None:
        await super().start()
        self._status.set_connected(True)

    async def watch(self) -> None:
        while True:
            await self.client.lost.wait()
            self._status.set_connected(False)
            with suppress(SmeltError):  # it has ended again
                await self.start()

    async def load_adapter(self, name: str, folder: str) -> None:
        await self._call("load_adapter", name, folder)

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name)

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake_up(self) -> None:
        await self._call("wake_up")

    async def _call(self, *call: Any) -> None:
        reader, writer = await asyncio.open_unix_connection(self._control)
        writer.write(json.dumps([call[0], call[1:]]).encode() + b"\n")
        answer = await reader.readline()
        writer.close()
        if not answer:
            raise ApiError(503, "the server is shutting down.", code="shutting_down")
        if (error := json.loads(answer)) is not None:
            status, message, param, code, headers = error
            raise ApiError(status, message, param=param, code=code, headers=headers)


def engine_socket(folder: Path) -> Path:
    """Return where the engine listens for API processes."""
    return folder / "engine.sock"


def control_socket(folder: Path) -> Path:
    """Return where the supervising process listens for them."""
    return folder / "control.sock"
