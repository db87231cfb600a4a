"""API keys, and the checks of Host and Origin that protect a server on loopback."""

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

MIN_KEY_LENGTH = 8
_MAX_FILE_BYTES = 1 << 20
Headers = Iterable[tuple[bytes, bytes]]


def read_keys(path: Path) -> frozenset[bytes]:
    """Return the SHA-256 of each key in a file, one per line; empty lines and lines that begin with # are skipped."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise SmeltError(f"the API key file {path} cannot be read ({error.strerror}).") from error
    lines = [line.strip() for line in content.splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys:
        raise SmeltError(f"{path} holds no API key; write one per line, for example from `openssl rand -hex 32`.")
    if any(len(key) < MIN_KEY_LENGTH for key in keys):
        raise SmeltError(f"{path} holds a key of fewer than {MIN_KEY_LENGTH} characters; use longer ones.")
    return frozenset(hashlib.sha256(key).digest() for key in keys)


def find_key(keys: Iterable[bytes], headers: Headers) -> bytes | None:
    """Return the digest of the request's key if it is valid. Every key is compared, each in constant time."""
    digest = hashlib.sha256(_request_key(headers)).digest()
    match = None
    for key in keys:
        if hmac.compare_digest(key, digest):
            match = key
    return match


def _request_key(headers: Headers) -> bytes:
    """Read `Authorization: Bearer`, `X-Api-Key`, or the password of HTTP Basic that a browser prompts for."""
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
            f"{host} can be reached from other machines; use --api-key-file, or bind to 127.0.0.1 (the default)."
        )


def host_allowed(headers: Headers) -> bool:
    """Check that the Host header is a loopback name, which stops DNS rebinding."""
    hosts = [value for name, value in headers if name == b"host"]
    return len(hosts) == 1 and is_loopback(_host_name(hosts[0]))


def origin_allowed(headers: Headers) -> bool:
    """Check that a request comes from the server's own page, or from no page at all."""
    fields = dict(headers)
    origin = fields.get(b"origin")
    return origin is None or urlsplit(origin).netloc == fields.get(b"host", b"")


def _host_name(host: bytes) -> str:
    """Strip the port."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]
