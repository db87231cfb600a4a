"""Who may talk to the server: API keys, and which names and pages a server on this machine answers to."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from smelt.errors import SmeltError

LEAST_KEY = 8  # characters
_MOST_FILE = 1 << 20
Headers = Iterable[tuple[bytes, bytes]]


def read_keys(path: Path) -> frozenset[bytes]:
    """The SHA-256 of every key in a file, one a line; empty lines and those that begin with # do not count."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_FILE)
    except OSError as error:
        raise SmeltError(f"the file of API keys {path} cannot be read ({error.strerror}).") from error
    lines = [line.strip() for line in content.splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys:
        raise SmeltError(f"{path} holds no API key; write one a line, for example from `openssl rand -hex 32`.")
    if any(len(key) < LEAST_KEY for key in keys):
        raise SmeltError(f"{path} holds a key of fewer than {LEAST_KEY} characters, which can be guessed; use longer.")
    return frozenset(hashlib.sha256(key).digest() for key in keys)


def known_key(keys: Iterable[bytes], headers: Headers) -> bytes | None:
    """The digest of the key that a request carries, if it is one of ours. All keys are compared, each in the same
    time whatever it is."""
    given = hashlib.sha256(_given_key(headers)).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(key, given):
            found = key
    return found


def _given_key(headers: Headers) -> bytes:
    """As `Authorization: Bearer`, as `X-Api-Key`, or as the password that a browser asks for."""
    for name, value in headers:
        if name == b"x-api-key":
            return value.strip()
        if name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                return rest.strip()
            if scheme.lower() == b"basic":
                try:
                    return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
                except binascii.Error:
                    return b""
    return b""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_binding(host: str, keys: frozenset[bytes]) -> None:
    if not keys and not is_loopback(host):
        raise SmeltError(
            f"{host} can be reached from other machines; give --api-key-file, or bind to 127.0.0.1 (the default)."
        )


def host_allowed(headers: Headers) -> bool:
    """Whether a request to a server on this machine calls it by a name of this machine. A foreign name that was made
    to point here (DNS rebinding) is none."""
    hosts = [value for name, value in headers if name == b"host"]
    return len(hosts) == 1 and is_loopback(_name(hosts[0]))


def origin_allowed(headers: Headers) -> bool:
    """Whether a request comes from our own page, or from no page at all."""
    found = dict(headers)
    origin = found.get(b"origin")
    return origin is None or urlsplit(origin).netloc == found.get(b"host", b"")


def _name(host: bytes) -> str:
    """Without the port."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]
