"""Several processes that serve HTTP in front of one engine: start them, watch them, end them together.

An event costs a process about 80 microseconds, so that one alone sends many tokens at once if the engine is fast. Each
API process has a connection to the engine and a listening socket of its own, between which the kernel distributes
connections. This process serves no HTTP: it supervises the engine and the API processes, and replaces those that die.
The sockets stay open here, so that connections wait while a process is replaced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path

from smelt.errors import SmeltError
from smelt.serve.server.control import PublishingSupervisor, ServedStatus, control_socket, engine_socket
from smelt.serve.server.http_server import bind_socket, log_address, raise_file_limit
from smelt.serve.server.service import engine_options, shared_counts
from smelt.serve.server.settings import ServerSettings
from smelt.serve.server.shared_table import SharedTable
from smelt.serve.worker.client import EngineClient, OtherModelError
from smelt.subprocesses import python_command, python_environment

logger = logging.getLogger(__name__)
CHECK_SECONDS = 0.1  # between two checks of the processes
END_SECONDS = 10.0  # beyond the time that requests have to finish


class ApiProcesses:
    """A server with several API processes."""

    command = tuple(python_command("-m", "smelt.serve.server.api_process"))

    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.count = settings, settings.api_server_count
        self.listeners: list[socket.socket] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._restarts: deque[float] = deque()
        self._stops = 0  # signals to stop

    def run(self) -> int:
        """Serve until a signal arrives. Return the exit code: 0, or 1 if the engine or the processes died too often."""
        raise_file_limit()
        with ExitStack() as stack:
            self.listeners = self._bind(stack)
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="smelt-")))
            self._memory = os.memfd_create("smelt-counts")
            stack.callback(os.close, self._memory)
            self._table = SharedTable(len(self.settings.keys), self.count + 1, 0, self._memory)
            self._status = ServedStatus(self.folder, self._table)
            return asyncio.run(self._run())

    def _bind(self, stack: ExitStack) -> list[socket.socket]:
        """Bind a socket for each process to one port, which no other server may have."""
        host, port = self.settings.host, self.settings.port
        with bind_socket(host, port) as probe:  # other sockets with SO_REUSEPORT would share the port unnoticed
            port = probe.getsockname()[1]
        return [stack.enter_context(bind_socket(host, port, reuse_port=True)) for _ in range(self.count)]

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        options = engine_options(self.settings)
        client = EngineClient(
            self.settings.model, observe=self._observe, listen=str(engine_socket(self.folder)),
            device=self.settings.device, **options,
        )  # fmt: skip
        self.supervisor = PublishingSupervisor(client, self.settings, self._status)
        control = await self.supervisor.listen(control_socket(self.folder))
        try:
            return await self._serve() if await self._load() else 0
        finally:
            await self._end_processes()
            control.close()
            await client.stop()

    def _observe(self, state: dict[str, int]) -> None:
        if self.supervisor.metrics is not None:
            self.supervisor.metrics.update_engine_state(state)

    async def _load(self) -> bool:
        """Load the model while the API processes import; return False if a signal to stop came first."""
        loading = asyncio.create_task(self.supervisor.start())
        await asyncio.sleep(0)  # starts the engine's process first
        self.processes = [self._start(index) for index in range(self.count)]
        while not self._stops and not loading.done():
            await asyncio.wait([loading], timeout=CHECK_SECONDS)
        if not loading.done():
            loading.cancel()
            return False
        try:
            loading.result()
        except OtherModelError as error:
            raise SmeltError(
                f"{self.settings.model} is for {error.task}, which one process serves; leave out --api-server-count."
            ) from error
        engine = self.supervisor.engine
        assert engine is not None
        metrics, self._admission, _ = shared_counts(
            self.settings, self.settings.served_names[0], engine.max_model_len, self._table
        )
        self.supervisor.count_in(metrics, lambda: self._admission.admitted)
        return True

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        """Start an API process. It ends when its standard input, which only this process holds, is closed."""
        listener = self.listeners[index]
        process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, pass_fds=[listener.fileno(), self._memory], env=python_environment()
        )
        start = {
            "settings": self.settings.to_json(), "folder": str(self.folder), "row": index + 1,
            "listener": listener.fileno(), "memory": self._memory,
        }  # fmt: skip
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(start).encode() + b"\n")
            process.stdin.flush()
        return process

    async def _serve(self) -> int:
        watching = asyncio.create_task(self.supervisor.watch())
        announced, stopped = False, 0
        try:
            while any(process.poll() is None for process in self.processes) or not self._stops:
                if self._stops > stopped or self.supervisor.given_up.is_set():
                    stopped = self._stops = max(self._stops, 1)
                    self._signal_processes()
                if not self._stops and not await self._replace_dead():
                    return 1
                if not announced and self._status.num_serving == self.count:
                    announced = True
                    log_address(self.settings, self.listeners[0])
                await asyncio.sleep(CHECK_SECONDS)
            logger.info("stopped")
            return 1 if self.supervisor.given_up.is_set() else 0
        finally:
            watching.cancel()

    async def _replace_dead(self) -> bool:
        """Start API processes anew that have died; return False if too many have."""
        for index, process in enumerate(self.processes):
            if process.poll() is None:
                continue
            now, limits = time.monotonic(), self.settings.limits
            while self._restarts and now - self._restarts[0] > limits.restart_window:
                self._restarts.popleft()
            if len(self._restarts) >= limits.max_restarts * self.count:
                logger.error("an API process died again after %d restarts; giving up", len(self._restarts))
                return False
            self._restarts.append(now)
            logger.error("an API process died; starting another")
            self._status.forget_process(index + 1)
            self._admission.forget_process(index + 1)
            self.processes[index] = self._start(index)
        return True

    def _stop(self) -> None:
        """Handle a signal: the first lets running requests finish, the second exits immediately."""
        self._stops += 1
        if self._stops == 1 and self.processes:
            logger.info("stopping; requests have %g seconds to finish", self.settings.limits.shutdown_timeout)

    def _signal_processes(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()

    async def _end_processes(self) -> None:
        """End what is still running: close their standard inputs, then kill them."""
        deadline = time.monotonic() + END_SECONDS
        for process in self.processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
            await asyncio.sleep(CHECK_SECONDS)
        for process in self.processes:
            process.kill()
            process.wait()
