"""A Ray of this process alone, or a cluster that runs already: what serving and training on Ray share.

Whoever reaches Ray's ports can run code as its user, since Ray sends functions between its processes by pickle. One
that is started here listens on loopback alone, asks for a token that only its own processes know, has no dashboard and
reports nothing home. For a cluster this is its owner's work.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
from typing import Any

from smelt.errors import ResourceError

log = logging.getLogger("smelt")
ALWAYS = {"RAY_USAGE_STATS_ENABLED": "0"}
ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the node's address is loopback: Ray's way of asking for it everywhere
    "RAY_AUTH_MODE": "token",
}
QUIET: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
STORE_BYTES = 80 << 20  # Ray's least, for objects that pass between processes; ours are short texts and errors
KNOCK_SECONDS = 3.0


def set_before(alone: bool) -> None:
    """What Ray reads when it is imported, and never again."""
    os.environ.update(ALWAYS)
    if alone and sys.modules.get("ray") is None:
        os.environ.update(ALONE, RAY_AUTH_TOKEN=secrets.token_hex(32))
    elif alone and not all(os.environ.get(name) == value for name, value in ALONE.items()):
        raise ResourceError(
            "ray was imported before, so that a Ray that is started here would be open to others; import it later, or "
            "call ray.init yourself."
        )


def start_alone(folder: str, **more: Any) -> None:
    """`folder`: of Ray's own files."""
    import ray

    ray.init(
        address="local", include_dashboard=False, object_store_memory=STORE_BYTES, _temp_dir=folder, **more, **QUIET
    )


def join_cluster(address: str) -> None:
    import ray

    try:
        _knock(address)
        ray.init(address=address, **QUIET)
    except (OSError, ValueError, RuntimeError) as error:
        raise ResourceError(
            f"there is no Ray cluster at {address} that this machine belongs to, or it wants a token "
            "(RAY_AUTH_TOKEN); start one with `ray start`, and run this on one of its machines."
        ) from error
    if os.environ.get("RAY_AUTH_MODE") != "token":
        log.warning("this Ray cluster asks for no token: whoever reaches its ports can run code on it")


def take_signals_back() -> None:
    """In the main thread. Ray puts handlers before those of Python, which print a stack for every SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))
        signal.siginterrupt(number, False)


def _knock(address: str) -> None:
    """Is anybody there? Ray itself would try for minutes and then end this process."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()
