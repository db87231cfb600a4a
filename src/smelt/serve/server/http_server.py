"""Serve HTTP in this process from start to end: the socket, the model, the signals."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import uvicorn

from smelt.errors import SmeltError
from smelt.logs import show_logs
from smelt.serve.server.access_log import AccessLog
from smelt.serve.server.app import create_app
from smelt.serve.server.connection import TimedConnection
from smelt.serve.server.errors import ApiError
from smelt.serve.server.middleware import RecordSink
from smelt.serve.server.service import Service, SupervisorFactory
from smelt.serve.server.settings import ServerSettings, TlsFiles
from smelt.serve.server.shared_table import SharedTable

logger = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 5  # that an idle connection stays open


def run_http_server(
    settings: ServerSettings, listener: socket.socket, supervisor_factory: SupervisorFactory,
    table: SharedTable | None = None, on_serving: Callable[[], None] | None = None,
) -> int:  # fmt: skip
    """Serve HTTP in this process until a signal arrives; return the exit code.

    By default it is the only process of its server and says where it listens; else `on_serving` is called instead.
    """
    raise_file_limit()
    tls = None if settings.tls is None else tls_context(settings.tls)
    with ExitStack() as stack:
        sinks = _record_sinks(settings, stack)
        service = Service(settings, supervisor_factory, table)
        run = _ServerRun(service, listener, tls, sinks, on_serving or partial(log_address, settings, listener))
        return asyncio.run(run.run())


def log_address(settings: ServerSettings, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    scheme = "http" if settings.tls is None else "https"
    logger.info("%s is served at %s://%s:%d (Ctrl-C stops it)", settings.served_names[0], scheme, address, port)


def _record_sinks(settings: ServerSettings, stack: ExitStack) -> list[RecordSink]:
    """Return what takes the records of requests: the access log, and a tracer, which is imported only if wanted."""
    sinks: list[RecordSink] = []
    if settings.access_log:
        log = stack.enter_context(closing(AccessLog(settings.access_log)))
        sinks.append(lambda record, _: log.write(record))
    if settings.otlp_endpoint:
        from smelt.serve.server.tracing import Tracer

        sinks.append(stack.enter_context(closing(Tracer(settings.otlp_endpoint))).record)
    return sinks


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for TLS 1.2 and later; never prompt for the password of a key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        password = "" if files.password_file is None else Path(files.password_file).read_text().strip()
        context.load_cert_chain(files.certificate, files.key, lambda: password)
    except (OSError, UnicodeDecodeError) as error:  # ssl.SSLError is an OSError
        reason = error.strerror if isinstance(error, OSError) and not isinstance(error, ssl.SSLError) else "not valid"
        raise SmeltError(
            f"the TLS certificate {files.certificate} or its key cannot be used ({reason}); check that both are PEM "
            "files that belong together, and the password file of an encrypted key."
        ) from error
    return context


class _ServerRun:
    def __init__(
        self, service: Service, listener: socket.socket, tls: ssl.SSLContext | None, sinks: Sequence[RecordSink],
        on_serving: Callable[[], None],
    ) -> None:  # fmt: skip
        self.service, self.settings = service, service.settings
        self.listener, self.tls, self.sinks, self.on_serving = listener, tls, sinks, on_serving
        self.stopping = asyncio.Event()
        self.server: _Uvicorn | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            return await self._serve() if await self._load() else 0
        finally:
            await self.service.stop()

    async def _load(self) -> bool:
        """Load the model; return False if a signal to stop came first."""
        loading, stopping = asyncio.create_task(self.service.start()), asyncio.create_task(self.stopping.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if loading.done():
            loading.result()
            gc.freeze()  # else a request with many objects would start a collection of all that was imported: a second
            return True
        loading.cancel()
        with suppress(asyncio.CancelledError):
            await loading
        return False

    async def _serve(self) -> int:
        service, limits = self.service, self.settings.limits
        TimedConnection.limits = limits
        config = uvicorn.Config(
            create_app(service, self.sinks), http=TimedConnection, ws="none", lifespan="off", loop="asyncio",
            log_config=None, access_log=False, server_header=False, proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS, h11_max_incomplete_event_size=limits.max_header_bytes,
            timeout_graceful_shutdown=int(limits.shutdown_timeout) + 3,
        )  # fmt: skip
        config.load()
        config.ssl = self.tls
        self.server = _Uvicorn(config)
        tasks = [asyncio.create_task(self._record_history())]
        if service.supervisor is not None:
            tasks += [asyncio.create_task(service.supervisor.watch()), asyncio.create_task(self._exit_when_given_up())]
        self.listener.listen(config.backlog)  # before the message, since a client may connect as soon as it reads it
        self.on_serving()
        await self.server.serve(sockets=[self.listener])
        for task in tasks:
            task.cancel()
        given_up = service.supervisor is not None and service.supervisor.given_up.is_set()
        logger.info("stopped")
        return 1 if given_up else 0

    def _stop(self) -> None:
        """Handle a signal: the first lets running requests finish, the second exits immediately."""
        if self.stopping.is_set():
            if self.server is not None:
                self.server.force_exit = True
            return
        self.stopping.set()
        if self.server is None:
            return
        logger.info("stopping; requests have %g seconds to finish", self.settings.limits.shutdown_timeout)
        self.service.admission.close()
        self.server.should_exit = True
        asyncio.get_running_loop().call_later(self.settings.limits.shutdown_timeout, self._cancel)

    def _cancel(self) -> None:
        if self.service.supervisor is not None:
            error = ApiError(503, "the server is shutting down; the answer is incomplete.", code="shutting_down")
            self.service.supervisor.client.fail(error)

    async def _exit_when_given_up(self) -> None:
        assert self.service.supervisor is not None and self.server is not None
        await self.service.supervisor.given_up.wait()
        self.service.admission.close()
        self.server.should_exit = True

    async def _record_history(self) -> None:
        while True:
            await asyncio.sleep(1)
            self.service.metrics.record_history()


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_ServerRun`: uvicorn would exit with the signal's code."""
        yield


def bind_socket(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Bind a socket before the model is loaded, since the port may be taken; it does not listen yet."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise SmeltError(f"cannot listen on {host} port {port} ({error.strerror}); choose another port.") from error
    return listener


def set_up_logging() -> None:
    """Log starts, stops and crashes to standard error; never anything of a request."""
    show_logs(prefix="smelt: ")
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def raise_file_limit() -> None:
    """Allow more open files: every connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 16384)), hard))
