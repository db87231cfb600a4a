"""Write files and folders atomically: completely or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from smelt.errors import ResourceError, SmeltError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def check_writable(path: Path) -> None:
    """Raise before any work starts if a path could not be written at the end."""
    with explain_disk_errors(path):
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()  # raises if the name is too long or a folder is not searchable
        parent = path.absolute().parent
        while not _accepts_entries(parent):
            parent = parent.parent


def _accepts_entries(folder: Path) -> bool:
    """Return whether a folder exists, which another process may delete meanwhile; raise if it cannot be written to."""
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder")
    writable = os.access(folder, os.W_OK | os.X_OK)
    if not writable and folder.exists():
        raise PermissionError(errno.EACCES, f"{folder} may not be written to")
    return writable


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
            mode = temporary.stat().st_mode & 0o666
            for file in temporary.rglob("*"):
                if file.is_file():
                    file.chmod(mode)  # safetensors lets only the owner read, but a server may be another user
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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created with its folder; refuse if another process holds it.

    The kernel releases the lock when the process ends, however it ends. The holder may delete the file, also with its
    folder: a process that opened the deleted file notices and creates a new one. Over NFS the lock is as good as
    flock is there; on a file system without locks nothing is locked.
    """
    while True:
        descriptor = _open_lock(path)
        if descriptor is None:  # the folder was deleted since it was created
            continue
        try:
            _lock(descriptor, path)
            if not _is_current(descriptor, path):
                continue
            with suppress(OSError):  # on a full disk the holder stays unnamed
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            yield
            return
        finally:
            os.close(descriptor)


def _open_lock(path: Path) -> int | None:
    with explain_disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            return None
        except FileExistsError:  # from mkdir, if the folder was deleted before it looked whether it is one
            if os.path.lexists(path.parent):
                raise
            return None


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        raise SmeltError(
            f"{path.parent} is in use by {holder}; wait until it ends, or choose another folder."
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _is_current(descriptor: int, path: Path) -> bool:
    """Return whether the path still names the open file: its former holder may have deleted it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def json_text(content: Any, *, ensure_ascii: bool = True) -> str:
    """Return strict JSON: values that JSON cannot represent, NaN and infinity, become null."""
    return json.dumps(_finite(content), indent=1, ensure_ascii=ensure_ascii, allow_nan=False) + "\n"


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content


def _is_disk_full(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "No space left" in str(error) or "Disk quota" in str(error)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
