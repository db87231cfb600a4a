"""Read files: plain text, or rows from JSONL, JSON, CSV, TSV and Parquet, optionally gzipped.

At most `MAX_FILE_BYTES` are read, so that a decompression bomb raises an error instead of exhausting memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smelt.data.named_datasets import unknown_source
from smelt.errors import DataError

Row = dict[str, Any]

MAX_FILE_BYTES = 2**30
_CHUNK_BYTES = 2**22
_GZIP_MAGIC = b"\x1f\x8b"

TEXT_SUFFIXES = (".txt", ".md")
TABLE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_SUFFIXES = ", ".join(TEXT_SUFFIXES + TABLE_SUFFIXES)


def suffix_of(path: Path) -> str:
    """Return the suffix that determines the format, ignoring `.gz`; a bare `.gz` is plain text."""
    if path.suffix.lower() != ".gz":
        return path.suffix.lower()
    return Path(path.stem).suffix.lower() or ".txt"


def read_text(path: Path) -> str:
    """Read the text of a plain text file, unchanged."""
    text = _read_utf8(path)
    if not text.strip():
        raise DataError(f"{path} is empty: give a file with text in it.")
    return text


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a table as dictionaries by column name."""
    if not path.exists():
        raise _missing_file(path)
    suffix = suffix_of(path)
    if suffix in (".jsonl", ".json"):
        rows = _json_rows(path)
    elif suffix in (".csv", ".tsv"):
        rows = _delimited_rows(path, tab=suffix == ".tsv")
    elif suffix == ".parquet":
        rows = _parquet_rows(path)
    else:
        raise DataError(f"{path} has no columns: give rows in one of {', '.join(TABLE_SUFFIXES)} (or .gz of it).")
    if not rows:
        raise DataError(f"{path} is empty: give a file with at least one row.")
    return rows


def column_names(rows: list[Row]) -> list[str]:
    """Return the columns of all rows, in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def column_values(rows: list[Row], name: str, source: str) -> list[Any]:
    """Return the values of a column; raise and list the columns if it does not exist."""
    columns = column_names(rows)
    if name not in columns:
        raise DataError(f"{source} has no column '{name}': its columns are {', '.join(columns)}.")
    return [row.get(name) for row in rows]


def text_column(rows: list[Row], name: str, source: str) -> tuple[str, ...]:
    """Return the values of a column, which must all be text."""
    values = column_values(rows, name, source)
    for number, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise DataError(f"{source} has no text in column '{name}' of row {number} but {_preview(value)}.")
    return tuple(values)


def _missing_file(path: Path) -> DataError:
    return DataError(f"{unknown_source(str(path))}, a data file ({_SUFFIXES} or .gz of it) or hub:owner/name.")


def _preview(value: Any) -> str:
    return "nothing" if value is None else f"{str(value)[:40]!r} ({type(value).__name__})"


def _read_bytes(path: Path) -> bytes:
    """Read the file's content, decompressing gzip (detected by its magic bytes, not its name)."""
    if path.is_dir():
        raise DataError(f"{path} is a folder: give a data file ({_SUFFIXES} or .gz of it).")
    if not path.is_file():
        raise _missing_file(path)
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP_MAGIC
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
            return _read_limited(stream, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a broken gzip file ({error}): write or download it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}).") from error


def _read_limited(stream: Any, path: Path) -> bytes:
    content = bytearray()
    while chunk := stream.read(_CHUNK_BYTES):
        content += chunk
        if len(content) > MAX_FILE_BYTES:
            raise DataError(f"{path} holds more than {MAX_FILE_BYTES / 2**30:.3g} GiB: give a smaller part of it.")
    return bytes(content)


def _read_utf8(path: Path) -> str:
    try:
        return _read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): convert it to UTF-8 first.") from error


def _json_rows(path: Path) -> list[Row]:
    """Read a list of objects, or one object per line; the first character decides which."""
    text = _read_utf8(path)
    if text.lstrip().startswith("["):
        return [_as_row(value, path, number) for number, value in enumerate(_parse_json(text, path, None), start=1)]
    return [_as_row(_parse_json(line, path, number), path, number) for number, line in _numbered_lines(text)]


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    # Only "\n" ends a line of JSONL: splitlines() would also split inside strings, e.g. at U+2028.
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def _parse_json(text: str, path: Path, line: int | None) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line_number = line if line is not None else error.lineno
        raise DataError(
            f"{path} line {line_number} is not valid JSON ({error.msg}): fix or remove the line."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} line {line or 1} holds JSON that cannot be read (too deep or too long).") from error


def _as_row(value: Any, path: Path, number: int) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{path} row {number} is a {type(value).__name__}: expected an object with named columns.")
    return value


def _delimited_rows(path: Path, tab: bool) -> list[Row]:
    """Read rows below a header line. In TSV a quote is a plain character, as in the GLUE files."""
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tab else {}
    previous_limit = csv.field_size_limit(MAX_FILE_BYTES)
    try:
        reader = csv.DictReader(io.StringIO(_read_utf8(path), newline=""), **options)
        return [_check_fields(row, path, reader.line_num) for row in reader]
    except csv.Error as error:
        raise DataError(f"{path} is not a readable table ({error}): check its quotes.") from error
    finally:
        csv.field_size_limit(previous_limit)


def _check_fields(row: dict[Any, Any], path: Path, line: int) -> Row:
    if None in row or None in row.values():
        raise DataError(
            f"{path} line {line} has a different number of fields than the header: check its separators and quotes."
        )
    return row


def _parquet_rows(path: Path) -> list[Row]:
    try:
        from pyarrow import ArrowException, BufferReader, parquet
    except ImportError as error:
        raise DataError(f"{path} is Parquet, which needs one more package: pip install smelt[parquet].") from error
    content = BufferReader(_read_bytes(path))
    try:
        file = parquet.ParquetFile(content)
        groups = range(file.metadata.num_row_groups)
        if sum(file.metadata.row_group(group).total_byte_size for group in groups) > MAX_FILE_BYTES:
            raise DataError(f"{path} unpacks to more than {MAX_FILE_BYTES / 2**30:.3g} GiB: give a smaller part of it.")
        rows: list[Row] = file.read().to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable Parquet file ({str(error).splitlines()[0]}).") from error
    return rows
