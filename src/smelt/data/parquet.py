"""Read the rows of a Parquet file: decoded in a subprocess with a memory limit, counted batch by batch."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

from smelt.data.limits import MAX_COLUMNS, ROW_BYTES, VALUE_BYTES, DecodedBytes
from smelt.errors import DataError, install_command
from smelt.subprocesses import python_command, python_environment

_PROCESS = Path(__file__).with_name("parquet_process.py")
_INVALID, _TOO_LARGE = 3, 4  # exit codes of the subprocess


def parquet_rows(stream: IO[bytes], path: Path, budget: DecodedBytes) -> list[dict[str, Any]]:
    """Return all rows of the Parquet file in a stream; `path` names it in errors."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise DataError(f"{path} is Parquet, which needs one more package: {install_command('parquet')}.") from error
    with tempfile.TemporaryFile() as file, tempfile.TemporaryFile() as messages:
        _copy(stream, file, budget)
        limits = (budget.limit, MAX_COLUMNS, ROW_BYTES, VALUE_BYTES)
        process = subprocess.Popen(
            python_command(str(_PROCESS), *map(str, limits)),
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=messages,
            env=python_environment(),
        )
        rows, problem = _receive(process, budget)
        messages.seek(0)
        sentence = messages.read(500).decode("utf-8", "replace")
    if process.returncode == _TOO_LARGE:
        raise budget.error()
    if process.returncode or problem:
        reason = sentence if process.returncode == _INVALID else problem
        raise _invalid(path, "the decoder crashed" if process.returncode < 0 else reason)
    return rows


def _copy(stream: IO[bytes], file: IO[bytes], budget: DecodedBytes) -> None:
    """Copy the file, which may be gzipped, to a temporary one that the subprocess can seek in."""
    copied = 0
    while chunk := stream.read(2**20):
        copied += len(chunk)
        budget.require(copied)
        file.write(chunk)
    file.flush()
    file.seek(0)


def _receive(process: subprocess.Popen[bytes], budget: DecodedBytes) -> tuple[list[dict[str, Any]], str]:
    """Convert the batches that the process writes until it ends; return the rows, and what went wrong."""
    from pyarrow import ArrowException, ipc

    rows: list[dict[str, Any]] = []
    assert process.stdout is not None
    try:
        with process.stdout as pipe:
            for batch in ipc.open_stream(pipe):
                budget.add(batch.nbytes + batch.num_rows * ROW_BYTES + VALUE_BYTES * sum(map(_values, batch.columns)))
                rows += batch.to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError) as error:
        process.wait()
        return [], str(error)
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()
    return rows, ""


def _values(array: Any) -> int:
    """Return the number of Python values that an array becomes, those of nested lists and structures included."""
    from pyarrow import types

    count = len(array)
    if types.is_struct(array.type):
        count += sum(map(_values, array.flatten()))
    elif types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        count += _values(array.flatten())
    elif types.is_map(array.type):
        count += _values(array.keys) + _values(array.items)
    return count


def _invalid(path: Path, reason: str) -> DataError:
    lines = reason.splitlines() or ["no reason given"]
    return DataError(f"{path} is not a readable Parquet file ({lines[0][:200]}).")
