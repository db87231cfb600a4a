"""Run a server from start to end, in one process or in several."""

from __future__ import annotations

from smelt.serve.server.api_processes import ApiProcesses
from smelt.serve.server.auth import check_binding
from smelt.serve.server.http_server import bind_socket, run_http_server, set_up_logging, tls_context
from smelt.serve.server.service import SupervisorFactory, supervise_subprocess
from smelt.serve.server.settings import ServerSettings


def serve(settings: ServerSettings, supervisor_factory: SupervisorFactory = supervise_subprocess) -> int:
    """Serve until a signal arrives. Return the exit code: 0, or 1 if a process died too often."""
    check_binding(settings.host, settings.keys)
    if settings.tls is not None:
        tls_context(settings.tls)  # refuses what cannot be used before the model is loaded
    set_up_logging()
    if settings.api_server_count > 1:
        return ApiProcesses(settings).run()
    with bind_socket(settings.host, settings.port) as listener:
        return run_http_server(settings, listener, supervisor_factory)
