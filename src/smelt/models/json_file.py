"""Read JSON objects from untrusted files: malformed, too deeply nested, or with duplicate keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smelt.errors import ModelError

_MAX_FILE_BYTES = 64 * 2**20


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; raise a ModelError that names the file if it is invalid."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ModelError(
                f"{path} is larger than {_MAX_FILE_BYTES // 2**20} MiB, too large for the JSON of a model."
            )
        raw = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_object(raw, str(path))


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse the JSON object in `raw`; `where` names it in errors."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON ({one_line(error)}).") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where} holds a JSON {type(value).__name__} where an object is expected.")
    return value


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def one_line(error: BaseException) -> str:
    """Return the message of a third-party error, shortened to one line, for use inside another message."""
    text = " ".join(str(error).split())[:200].rstrip(".")
    return text if " " in text else f"{type(error).__name__} {text}".strip()
