"""Writing files and folders whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from smelt.errors import ResourceError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with full_disk_told(path):
            write(temporary)
            _flush(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that becomes `path` when the block ends well, and vanishes when it does not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with full_disk_told(path):
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    _flush(file)
            temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def full_disk_told(path: Path) -> Iterator[None]:
    """A disk that fills up, or a folder one may not write to, becomes one clear sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"the disk is full: {path} could not be written; free some space or choose another folder."
            raise ResourceError(message) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            message = f"{path} could not be written: {error.strerror}; choose a folder you may write to."
            raise ResourceError(message) from error
        raise
    except Exception as error:  # safetensors reports a full disk as an error of its own kind
        if "No space left" in str(error) or "Disk quota" in str(error):
            message = f"the disk is full: {path} could not be written; free some space or choose another folder."
            raise ResourceError(message) from error
        raise


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
