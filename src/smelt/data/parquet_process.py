"""Decode a Parquet file in a process of its own: standard input to Arrow batches on standard output.

Run as a script, `python parquet_process.py LIMIT MAX_COLUMNS ROW_BYTES VALUE_BYTES`. The sizes in a Parquet file are
claims, and one page can expand to gigabytes inside the decoder: only the operating system can stop that. It imports
nothing of Smelt, so that it starts fast.
Exit codes: 3 with a sentence on standard error if the file is invalid, 4 if it needs more memory than the limit.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import ipc, parquet

INVALID = 3
TOO_LARGE = 4
_ROWS_PER_BATCH = 1024
_MESSAGE_BYTES = 64 * 2**20


def main(limit: int, max_columns: int, row_bytes: int, value_bytes: int) -> int:
    """Write the batches; `row_bytes` and `value_bytes` are what a row and each of its values take in the receiver."""
    _limit_memory(limit)
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # the others reserve address space in advance
    try:
        file = parquet.ParquetFile(sys.stdin.buffer, pre_buffer=False)
        columns, rows = file.metadata.num_columns, file.metadata.num_rows
        if columns > max_columns:
            raise ValueError(f"it has {columns:,} columns; at most {max_columns:,} are read")
        if rows * (row_bytes + columns * value_bytes) > limit:
            return TOO_LARGE
        _write_batches(file)
    except (BrokenPipeError, MemoryError, pyarrow.ArrowMemoryError):  # a closed pipe: the receiver has had enough
        return TOO_LARGE
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, TypeError, KeyError) as error:
        print(" ".join(str(error).split())[:200], file=sys.stderr)
        return INVALID
    return 0


def _write_batches(file: Any) -> None:
    schema = pyarrow.schema([(field.name, _plain_type(field.type)) for field in file.schema_arrow])
    with ipc.new_stream(sys.stdout.buffer, schema) as writer:
        for batch in file.iter_batches(_ROWS_PER_BATCH, use_threads=False):
            for part in _split(_as_plain(batch, schema)):
                writer.write_batch(part)
    sys.stdout.buffer.flush()


def _limit_memory(limit: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has these limits
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limit, used + limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _plain_type(kind: Any) -> Any:
    """Return the type of the decoded values; refuse types whose values may be shared, so that sizes are real."""
    plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    for name in ("dictionary<", "run_end_encoded<", "list_view<", "extension<"):
        if name in str(plain):
            raise ValueError(f"it has a column of the unsupported type {str(plain)[:80]}")
    return plain


def _as_plain(batch: Any, schema: Any) -> Any:
    """Decode dictionary columns, so that a batch has the size of its values."""
    columns = [
        column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column for column in batch.columns
    ]
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema) if columns else batch


def _split(batch: Any) -> Iterator[Any]:
    """Cut a batch into messages of limited size, so that the receiver can stop between them."""
    step = max(1, batch.num_rows * _MESSAGE_BYTES // max(batch.nbytes, _MESSAGE_BYTES))
    for start in range(0, batch.num_rows, step):
        yield batch.slice(start, step)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
