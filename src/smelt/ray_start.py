"""Start a private local Ray or join a running cluster; shared by serving and training.

Anyone who can reach Ray's ports can run code as its user, since Ray sends pickled functions between its processes. One
started here listens on loopback only, requires a token known only to its own processes, has no dashboard and sends no
usage statistics. Securing a cluster is up to its owner.
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

logger = logging.getLogger(__name__)
COMMON_ENV = {"RAY_USAGE_STATS_ENABLED": "0"}
LOCAL_ENV = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray use loopback as the node's address
    "RAY_AUTH_MODE": "token",
}
QUIET: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
STORE_BYTES = 80 << 20  # Ray's minimum for its object store; our objects are small
CONNECT_TIMEOUT = 3.0  # seconds


def set_ray_environment(local: bool) -> None:
    """Set the environment variables that Ray reads only when it is imported."""
    os.environ.update(COMMON_ENV)
    if local and sys.modules.get("ray") is None:
        os.environ.update(LOCAL_ENV, RAY_AUTH_TOKEN=secrets.token_hex(32))
    elif local and not all(os.environ.get(name) == value for name, value in LOCAL_ENV.items()):
        raise ResourceError(
            "ray was imported before, so a Ray started now would accept connections from others; import it later, or "
            "call ray.init yourself."
        )


def start_local_ray(folder: str, **options: Any) -> None:
    """Start a local Ray that keeps its files in `folder`."""
    import ray

    ray.init(
        address="local", include_dashboard=False, object_store_memory=STORE_BYTES, _temp_dir=folder, **options, **QUIET
    )


def join_cluster(address: str) -> None:
    import ray

    try:
        _check_reachable(address)
        ray.init(address=address, **QUIET)
    except (OSError, ValueError, RuntimeError) as error:
        raise ResourceError(
            f"there is no Ray cluster at {address} that this machine belongs to, or it requires a token "
            "(RAY_AUTH_TOKEN); start one with `ray start`, and run this on one of its machines."
        ) from error
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning("this Ray cluster requires no token: anyone who can reach its ports can run code on it")


def restore_signal_handlers() -> None:
    """Restore Python's signal handlers (in the main thread): those of Ray print a stack trace for every SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))
        signal.siginterrupt(number, False)


def _check_reachable(address: str) -> None:
    """Check that the address accepts connections: Ray would retry for minutes and then exit this process."""
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT).close()
