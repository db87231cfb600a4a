"""Read JSON objects from untrusted files: malformed, huge, too deeply nested, or with duplicate keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from smelt.errors import ModelError

_MAX_FILE_BYTES = 64 * 2**20
_MAX_NESTING = 64
# An empty list costs 2 bytes in a file and about 64 in memory, so that the number of values bounds the memory.
MAX_VALUES = 2**20


def read_object(path: Path, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Read the JSON object in a file; raise a ModelError that names the file if it is invalid."""
    return parse_object(read_limited(path, _MAX_FILE_BYTES), str(path), max_values)


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file; raise a ModelError for a larger file, and for pipes and devices."""
    try:
        if not path.is_file():  # opening a named pipe would block, and a device may have no end
            raise ModelError(f"{path} is missing or not a regular file.")
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    if len(raw) > max_bytes:
        raise ModelError(f"{path} is larger than {max_bytes // 2**20} MiB, too large for this file of a model.")
    return raw


def parse_object(raw: bytes, where: str, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Parse the JSON object in `raw`; `where` names it in errors."""
    # Each value but the first follows a comma, a bracket or a brace; those inside strings are counted too, which errs
    # on the safe side.
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > max_values:
        raise ModelError(f"{where} holds more than {max_values} JSON values, too many for this file of a model.")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON ({one_line(error)}).") from error
    if not isinstance(value, dict):
        raise ModelError(f"{where} holds a JSON {type(value).__name__} where an object is expected.")
    _check_nesting(value, where)
    return value


def _check_nesting(value: Any, where: str) -> None:
    level = [value]
    for _ in range(_MAX_NESTING):
        children = (item for parent in level for item in (parent.values() if isinstance(parent, dict) else parent))
        level = [item for item in children if isinstance(item, dict | list)]
        if not level:
            return
    raise ModelError(f"{where} is nested more than {_MAX_NESTING} levels deep.")


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value


def one_line(error: BaseException) -> str:
    """Return the message of a third-party error, shortened to one line, for use inside another message."""
    text = " ".join(str(error).split())[:200].rstrip(".")
    return text if " " in text else f"{type(error).__name__} {text}".strip()
