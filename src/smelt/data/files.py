"""Read files: plain text, or rows from JSONL, JSON, CSV, TSV and Parquet, optionally gzipped.

Files are read as streams, and what they decode to is counted on the way (`smelt.data.limits`): a decompression bomb
raises an error instead of exhausting memory.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from smelt.data import limits
from smelt.data.limits import DecodedBytes, check_columns, check_regular_file, json_bytes, list_names
from smelt.data.named_datasets import unknown_source
from smelt.errors import DataError

Row = dict[str, Any]

_CHUNK_BYTES = 2**22
_GZIP_MAGIC = b"\x1f\x8b"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")

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
    text = _read_utf8(path, DecodedBytes(path))
    if not text.strip():
        raise DataError(f"{path} is empty: give a file with text in it.")
    if text.count("\0") > len(text) // 10:
        raise DataError(f"{path} is not text, or is UTF-16: convert it to UTF-8 first.")
    return text


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a table as dictionaries by column name."""
    check_regular_file(path)
    if not path.exists():
        raise _missing_file(path)
    suffix, budget = suffix_of(path), DecodedBytes(path)
    if suffix in (".jsonl", ".json"):
        rows = _json_rows(path, budget)
    elif suffix in (".csv", ".tsv"):
        rows = _delimited_rows(path, suffix == ".tsv", budget)
    elif suffix == ".parquet":
        rows = _parquet_rows(path, budget)
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
        raise DataError(f"{source} has no column '{name}': its columns are {list_names(columns)}.")
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


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressing gzip (detected by its magic bytes, not its name)."""
    check_regular_file(path)
    if not path.exists():
        raise _missing_file(path)
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP_MAGIC
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as stream:
            yield stream  # type: ignore[misc]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is a broken gzip file ({error}): write or download it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}).") from error


def _read_utf8(path: Path, budget: DecodedBytes) -> str:
    """Read the whole file as text."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    parts: list[str] = []
    characters, width, offset = 0, 1, 0
    with _open(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            offset += len(chunk)
            pending = len(decoder.getstate()[0])
            try:
                parts.append(decoder.decode(chunk))
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset - len(chunk) - pending + error.start) from error
            characters += len(parts[-1])
            width = max(width, _character_bytes(parts[-1]))
            budget.require(characters * width)
    if decoder.getstate()[0]:
        raise _not_utf8(path, offset - len(decoder.getstate()[0]))
    budget.add(characters * width)
    return "".join(parts)


def _character_bytes(text: str) -> int:
    """Return the bytes per character of a string in memory: one wide character widens all others."""
    return max(1, (sys.getsizeof(text) - sys.getsizeof("")) // max(1, len(text)))


def _not_utf8(path: Path, position: int) -> DataError:
    return DataError(f"{path} is not UTF-8 text (byte {position}): convert it to UTF-8 first.")


def _lines(stream: IO[bytes], path: Path) -> Iterator[str]:
    # Only "\n" ends a line of JSONL: splitlines() would also split inside strings, e.g. at U+2028.
    offset = 0
    while raw := stream.readline(limits.MAX_RECORD_BYTES + 1):
        if len(raw) > limits.MAX_RECORD_BYTES:
            raise _long_record(path)
        try:
            yield raw.decode("utf-8" if offset else "utf-8-sig")
        except UnicodeDecodeError as error:
            raise _not_utf8(path, offset + error.start) from error
        offset += len(raw)


def _long_record(path: Path) -> DataError:
    size = f"{limits.MAX_RECORD_BYTES / 2**20:.3g} MiB"
    return DataError(f"{path} has a row of more than {size}: split it into several rows.")


def _json_rows(path: Path, budget: DecodedBytes) -> list[Row]:
    """Read a list of objects, or one object per line; the first character decides which."""
    with _open(path) as stream:
        is_list = stream.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if is_list:
        values = _parse_json(_read_utf8(path, DecodedBytes(path)), path, None, budget)
        return [_as_row(value, path, number) for number, value in enumerate(values, start=1)]
    with _open(path) as stream:
        numbered = ((number, line) for number, line in enumerate(_lines(stream, path), start=1) if line.strip())
        return [_as_row(_parse_json(line, path, number, budget), path, number) for number, line in numbered]


def _parse_json(text: str, path: Path, line: int | None, budget: DecodedBytes) -> Any:
    budget.add(json_bytes(text))
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line_number = line if line is not None else error.lineno
        raise DataError(
            f"{path} line {line_number} is not valid JSON ({error.msg}): fix or remove the line."
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} line {line or 1} holds JSON that cannot be read (too deep or too long).") from error
    if _SURROGATE_ESCAPE.search(text):
        _check_surrogates(value, path, line)
    return value


def _check_surrogates(value: Any, path: Path, line: int | None) -> None:
    """Raise if a string holds half of a surrogate pair, which JSON can spell but which is not text."""
    for number, part in enumerate(value, start=1) if line is None else [(line, value)]:
        try:
            json.dumps(part, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = f"\\u{ord(error.object[error.start]):04x}"
            where = f"row {number}" if line is None else f"line {number}"
            raise DataError(f"{path} {where} has {code} alone, which is half a character: fix or remove it.") from error


def _as_row(value: Any, path: Path, number: int) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{path} row {number} is a {type(value).__name__}: expected an object with named columns.")
    return value


def _delimited_rows(path: Path, tab: bool, budget: DecodedBytes) -> list[Row]:
    """Read rows below a header line. In TSV a quote is a plain character, as in the GLUE files."""
    options: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tab else {}
    previous_limit = csv.field_size_limit(limits.MAX_RECORD_BYTES)
    rows: list[Row] = []
    try:
        with _open(path) as stream:
            lines = _RecordLines(_lines(stream, path), path, budget, "\t" if tab else ",")
            reader = csv.DictReader(lines, **options)
            check_columns(len(reader.fieldnames or ()), path)
            for row in reader:
                lines.record_bytes = 0
                rows.append(_check_fields(row, path, reader.line_num))
                budget.add(limits.ROW_BYTES + sum(map(sys.getsizeof, row.values())))
    except csv.Error as error:
        raise DataError(f"{path} is not a readable table ({error}): check its quotes.") from error
    finally:
        csv.field_size_limit(previous_limit)
    return rows


class _RecordLines:
    """The lines of a CSV file. A record with quoted line breaks has several, which are limited together."""

    def __init__(self, lines: Iterator[str], path: Path, budget: DecodedBytes, delimiter: str) -> None:
        self.lines, self.path, self.budget, self.delimiter = lines, path, budget, delimiter
        self.record_bytes = 0

    def __iter__(self) -> Iterator[str]:
        for line in self.lines:
            self.record_bytes += len(line)
            if self.record_bytes > limits.MAX_RECORD_BYTES:
                raise _long_record(self.path)
            self.budget.require(sys.getsizeof(line) + limits.VALUE_BYTES * line.count(self.delimiter))
            yield line


def _check_fields(row: dict[Any, Any], path: Path, line: int) -> Row:
    if None in row or None in row.values():
        raise DataError(
            f"{path} line {line} has a different number of fields than the header: check its separators and quotes."
        )
    return row


def _parquet_rows(path: Path, budget: DecodedBytes) -> list[Row]:
    from smelt.data.parquet import parquet_rows

    with _open(path) as stream:
        return parquet_rows(stream, path, budget)
