"""API keys, and the checks of Host and Origin that protect a server on loopback."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smelt.errors import SmeltError

MIN_KEY_LENGTH = 8
_MAX_FILE_BYTES = 1 << 20
Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True)
class ApiKey:
    """What the holder of a key may do."""

    name: str  # in the access log
    allow_priority: bool = False  # to set `priority` in requests
    allow_admin: bool = False  # to change the server: LoRA adapters, sleep
    rpm: int | None = None  # requests per minute
    tpm: int | None = None  # tokens per minute, of prompts and answers
    weight: int = 1  # share of the engine while other keys wait


Keys = Mapping[bytes, ApiKey]  # by the SHA-256 of each key


def read_keys(path: Path) -> Keys:
    """Read a file with one key per line, and options behind it: `KEY name=team priority=allow rpm=60 tpm=10000`.

    Empty lines and lines that begin with # are skipped.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise SmeltError(f"the API key file {path} cannot be read ({error.strerror}).") from error
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate(content.splitlines(), 1):
        key, *options = line.split()[:10] or [b""]
        if not key or key.startswith(b"#"):
            continue
        if len(key) < MIN_KEY_LENGTH:
            raise SmeltError(f"{path} holds a key of fewer than {MIN_KEY_LENGTH} characters; use longer ones.")
        keys[hashlib.sha256(key).digest()] = _key_options(options, f"key-{len(keys) + 1}", f"line {number} of {path}")
    if not keys:
        raise SmeltError(f"{path} holds no API key; write one per line, for example from `openssl rand -hex 32`.")
    return keys


def _key_options(options: list[bytes], name: str, where: str) -> ApiKey:
    """Read the options behind a key; errors do not quote the line, which holds the key."""
    values: dict[str, Any] = {"name": name}
    for option in options:
        text, _, value = option.decode("latin-1").partition("=")
        if text == "name" and re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
            values["name"] = value
        elif text in ("priority", "admin") and value in ("allow", "deny"):
            values[f"allow_{text}"] = value == "allow"
        elif text in ("rpm", "tpm", "weight") and re.fullmatch(r"[1-9][0-9]{0,8}", value):
            values[text] = int(value)
        else:
            known = "name=NAME, priority=allow, admin=allow, rpm=N, tpm=N, weight=N"
            raise SmeltError(f"{where} has an invalid option; there are {known}.")
    return ApiKey(**values)


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
        if name == b"x-api-key" and value.strip():  # our pages send it empty until they have a key
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


def check_binding(host: str, keys: Collection[bytes]) -> None:
    if not keys and not is_loopback(host):
        raise SmeltError(
            f"{host} can be reached from other machines; use --api-key-file, or bind to 127.0.0.1 (the default)."
        )


def host_allowed(headers: Headers) -> bool:
    """Check that the Host header is a loopback name, which stops DNS rebinding."""
    hosts = [value for name, value in headers if name == b"host"]
    return len(hosts) == 1 and is_loopback(_host_name(hosts[0]))


def origin_allowed(headers: Headers, allowed: frozenset[bytes] = frozenset()) -> bool:
    """Check that a request comes from the server's own page, from one of an allowed origin, or from no page at all."""
    fields = dict(headers)
    origin = fields.get(b"origin")
    return origin is None or origin in allowed or urlsplit(origin).netloc == fields.get(b"host", b"")


def _host_name(host: bytes) -> str:
    """Strip the port."""
    text = host.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]
