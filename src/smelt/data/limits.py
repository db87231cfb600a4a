"""Limit the memory that a data file decodes to, while it is decoded.

The size of a compressed file says nothing: 300 bytes of Parquet can decode to gigabytes, and a row of two characters
takes hundreds of bytes as Python objects. Every reader therefore counts what it is about to create.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from smelt.errors import DataError

MAX_DECODED_BYTES = 4 * 2**30  # of one file, in memory
MAX_RECORD_BYTES = 64 * 2**20  # of one line of JSON or one record of CSV, in the file
MAX_COLUMNS = 10_000
LIMIT_VARIABLE = "SMELT_MAX_DECODED_BYTES"

# Sizes of Python objects, rounded up.
ROW_BYTES = 240  # a dictionary of a few keys, and its place in the list
VALUE_BYTES = 64  # a number, an empty string or list


class DecodedBytes:
    """Count the memory of what a file decodes to, and refuse the file before it exceeds the limit."""

    def __init__(self, path: Path | str) -> None:
        self.path = path
        self.limit = max_decoded_bytes()
        self.count = 0

    def add(self, amount: int) -> None:
        """Count `amount` bytes that are about to be created."""
        self.require(amount)
        self.count += amount

    def require(self, amount: int) -> None:
        """Raise if `amount` more bytes would exceed the limit, without counting them."""
        if self.count + amount > self.limit:
            raise self.error()

    def error(self) -> DataError:
        return DataError(
            f"{self.path} decodes to more than {_gigabytes(self.limit)}: give a smaller part of it, or set "
            f"{LIMIT_VARIABLE} to a larger number of bytes if you trust the file."
        )


def max_decoded_bytes() -> int:
    """Return the limit per file: SMELT_MAX_DECODED_BYTES, else `MAX_DECODED_BYTES`."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return MAX_DECODED_BYTES
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) > 0):
        raise DataError(f"{LIMIT_VARIABLE} must be a number of bytes, such as {8 * 2**30}, not {text!r:.40}.")
    return int(text)


def check_regular_file(path: Path) -> None:
    """Raise unless an existing path is a regular file: a FIFO or device can block or never end."""
    if path.is_dir():
        raise DataError(f"{path} is a folder: give a data file.")
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a regular file but a pipe or device: save its content to a file first.")


def check_columns(count: int, path: Path) -> None:
    """Raise for a table with absurdly many columns."""
    if count > MAX_COLUMNS:
        raise DataError(f"{path} has {count:,} columns; at most {MAX_COLUMNS:,} are read: keep only those you need.")


def json_bytes(text: str) -> int:
    """Return an upper bound of the memory that JSON text decodes to, from the characters that begin its values."""
    values = text.count(",") + text.count(":") + text.count("[")
    return sys.getsizeof(text) + VALUE_BYTES * values + ROW_BYTES * text.count("{")


def list_names(names: Iterable[str]) -> str:
    """Join names for a message: at most twenty, each shortened."""
    every = list(names)
    listed = ", ".join(f"{name!s:.40}" for name in every[:20])
    return listed if len(every) <= 20 else f"{listed} and {len(every) - 20:,} more"


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**20 else f"{size:,} bytes"
