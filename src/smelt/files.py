"""Write files and folders atomically: completely or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smelt.errors import ResourceError


def check_writable(path: Path) -> None:
    """Raise before any work starts if a path could not be written at the end."""
    with explain_disk_errors(path):
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # raises if the name is too long or a folder is not searchable
        parent = path.absolute().parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{parent} is not a folder")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{parent} may not be written to")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            _flush(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path, inside: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` when the block succeeds and deleted when it fails.

    It is created beside `path` or `inside` a folder on the same disk; a killed process leaves it there.
    """
    temporary = (inside or path.parent) / f".{path.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with explain_disk_errors(path):
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    _flush(file)
            temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Convert disk-full and permission errors into a one-sentence ResourceError."""
    try:
        yield
    except Exception as error:  # safetensors and tokenizers raise their own types when the disk is full
        if _is_disk_full(error):
            message = f"the disk is full: {path} could not be written; free some space or choose another folder."
            raise ResourceError(message) from error
        if isinstance(error, OSError) and error.errno is not None:
            message = f"{path} could not be written: {error.strerror}; choose a writable folder."
            raise ResourceError(message) from error
        raise


def _is_disk_full(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "No space left" in str(error) or "Disk quota" in str(error)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
