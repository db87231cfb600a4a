"""Load each folder given on the command line in a process without a network; print the outcomes as JSON.

Any attempt to look up a host or to connect fails and is recorded. Run as a module by test_hub_access.py.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

ATTEMPTS: list[str] = []


def _refuse(*arguments: Any, **options: Any) -> Any:
    ATTEMPTS.append(str(arguments[-2:]))
    raise OSError("no network in this process")


socket.getaddrinfo = _refuse
socket.socket.connect = _refuse  # type: ignore[method-assign]
socket.socket.connect_ex = _refuse  # type: ignore[method-assign]

from huggingface_hub import HfApi  # noqa: E402

from smelt.errors import SmeltError  # noqa: E402
from smelt.models.config import hub_offline  # noqa: E402
from smelt.models.load import load, skeleton  # noqa: E402


def _outcome(action: Any) -> str:
    try:
        action()
    except SmeltError as error:
        return str(error)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def _report(folder: str) -> dict[str, Any]:
    ATTEMPTS.clear()
    outcomes = [_outcome(lambda: load(folder)), _outcome(lambda: skeleton(folder))]
    return {"outcomes": outcomes, "attempts": list(ATTEMPTS)}


def _controls() -> dict[str, int]:
    """Count the attempts of a request to the hub as it is, and inside `hub_offline`: the first shows that we count."""
    ATTEMPTS.clear()
    _outcome(lambda: HfApi().model_info("attacker/beacon"))
    before = len(ATTEMPTS)
    with hub_offline():
        _outcome(lambda: HfApi().model_info("attacker/beacon"))
    inside = len(ATTEMPTS) - before
    _outcome(lambda: HfApi().model_info("attacker/beacon"))
    return {"plain": before, "offline": inside, "afterward": len(ATTEMPTS) - before - inside}


if __name__ == "__main__":
    print(json.dumps({"controls": _controls(), "folders": {folder: _report(folder) for folder in sys.argv[1:]}}))
