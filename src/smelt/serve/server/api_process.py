"""One of several processes that serve HTTP in front of one engine.

    python -m smelt.serve.server.api_process      (started by `smelt.serve.server.api_processes`)

It reads its settings from standard input, and ends when that is closed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from smelt.serve.server import http_server
from smelt.serve.server.control import AttachedSupervisor, ServedStatus
from smelt.serve.server.http_server import run_http_server, set_up_logging
from smelt.serve.server.settings import ServerSettings
from smelt.serve.server.shared_table import SharedTable
from smelt.serve.worker.client import Observer


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to all by Ctrl-C: the process that started this one decides
    set_up_logging()
    http_server.logger.setLevel(logging.WARNING)  # its parent says when all have started or stopped
    start = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    settings, folder = ServerSettings.from_json(start["settings"]), Path(start["folder"])
    table = SharedTable(len(settings.keys), settings.api_server_count + 1, start["row"], start["memory"])
    status = ServedStatus(folder, table)

    def attach(settings: ServerSettings, observe: Observer, options: dict[str, Any]) -> AttachedSupervisor:
        return AttachedSupervisor(folder, status, settings.limits)

    with socket.socket(fileno=start["listener"]) as listener:
        sys.exit(run_http_server(settings, listener, attach, table, status.set_serving))


def _exit_with_parent() -> None:
    while os.read(0, 1):  # not sys.stdin.read(), whose lock would be held when the interpreter ends
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
