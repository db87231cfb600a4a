"""Hash files and folders of any size with bounded memory, several files at a time.

Every file is read once, in chunks of 8 MiB. For files that are hashed again and again, such as the weights of a source
model, the hashes can be kept in a small cache, which is valid while path, size, times and inode are unchanged.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from smelt.cache import cache_folder
from smelt.errors import ResourceError, SmeltError
from smelt.files import write_atomically
from smelt.progress import NullProgress, Progress

CHUNK_BYTES = 8 * 2**20
MAX_FILES = 100_000
_MAX_THREADS = 4
_MAX_CACHED = 10_000
_MAX_CACHE_BYTES = 8 * 2**20
# A file that was changed this recently may change again without a new time, so its hash is not kept.
_SETTLED_NS = 2 * 10**9


def hash_file(path: Path) -> str:
    """Return the sha256 of a regular file in hexadecimal, read in chunks."""
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def hash_folder(
    folder: Path, *, cache: bool = False, progress: Progress | None = None, follow_links: bool = False
) -> dict[str, str]:
    """Return the sha256 of every file of a folder and its subfolders by relative POSIX path; sockets are skipped.

    A symbolic link is an error, because it may lead out of the folder; with `follow_links` a link to a file counts as
    the file it leads to, as in the hub's cache. `cache` is described at `hash_files`.
    """
    return hash_files(list_files(folder, follow_links=follow_links), cache=cache, progress=progress)


def fingerprint_of(hashes: Mapping[str, str]) -> str:
    """Return one sha256 over the names and hashes of several files, independent of their order."""
    lines = json.dumps(sorted(hashes.items()), separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(lines.encode("ascii")).hexdigest()


def list_files(folder: Path, *, follow_links: bool = False) -> dict[str, Path]:
    """Return every file of a folder and its subfolders by relative POSIX path, without opening any."""
    files: dict[str, Path] = {}
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        with _explain_read_errors(current), os.scandir(current) as entries:
            for entry in entries:
                path = Path(entry.path)
                mode = entry.stat(follow_symlinks=follow_links and entry.is_file()).st_mode
                if stat.S_ISDIR(mode):
                    waiting.append(path)
                elif stat.S_ISREG(mode):
                    files[path.relative_to(folder).as_posix()] = path
                elif not stat.S_ISSOCK(mode):
                    kind = "a symbolic link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
                    raise SmeltError(f"{path} is {kind}, so {folder} cannot be hashed; replace it by a plain file.")
                if len(files) > MAX_FILES:
                    raise SmeltError(f"{folder} holds more than {MAX_FILES} files, which is no model.")
    return dict(sorted(files.items()))


def hash_files(files: Mapping[str, Path], *, cache: bool = False, progress: Progress | None = None) -> dict[str, str]:
    """Return the sha256 of each file by the name given to it.

    With `cache`, a file whose path, size, times and inode are as before is not read again. The cache is for files that
    a user owns and names, never for deciding whether a downloaded folder is intact.
    """
    cached = _load_cache() if cache else {}
    states = {name: _state(path) for name, path in files.items()} if cache else {}
    hashes = {name: cached[state] for name, state in states.items() if state in cached}
    rest = {name: path for name, path in files.items() if name not in hashes}
    fresh = _hash_all(rest, progress or NullProgress()) if rest else {}
    if cache and fresh:
        newest = time.time_ns() - _SETTLED_NS
        settled = {states[name]: hashed for name, hashed in fresh.items() if _newest_time(states[name]) < newest}
        _check_unchanged(rest, states)
        if settled:
            _save_cache(settled)
    hashes |= fresh
    return {name: hashes[name] for name in files}


def _hash_all(files: Mapping[str, Path], progress: Progress) -> dict[str, str]:
    """Hash files in threads; one step of progress is one chunk."""
    events: SimpleQueue[tuple[str, str] | BaseException | None] = SimpleQueue()
    stop = threading.Event()
    hashes: dict[str, str] = {}

    def hash_one(name: str, path: Path) -> None:
        digest = hashlib.sha256()
        try:
            for chunk in _chunks(path):
                if stop.is_set():
                    return
                digest.update(chunk)
                events.put(None)
            events.put((name, digest.hexdigest()))
        except BaseException as error:
            events.put(error)

    def finished_chunks() -> Iterator[None]:
        while len(hashes) < len(files):
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            if event is not None:
                hashes[event[0]] = event[1]
            else:
                yield None

    sizes = [_size(path) for path in files.values()]
    chunks = sum(-(-size // CHUNK_BYTES) for size in sizes)
    description = f"hashing {sum(sizes) / 1e9:.1f} GB"
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        try:
            for name, path in files.items():
                pool.submit(hash_one, name, path)
            for _ in progress.track(finished_chunks(), description, total=chunks):
                pass
        finally:
            stop.set()  # on an error or Ctrl-C, threads stop at their next chunk
            pool.shutdown(wait=True, cancel_futures=True)
    return hashes


def _size(path: Path) -> int:
    with _explain_read_errors(path):
        return path.stat().st_size


def _chunks(path: Path) -> Iterator[memoryview]:
    """Yield the content of a regular file; each chunk is valid until the next one is requested."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with _explain_read_errors(path):
        # A pipe would block in open() until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SmeltError(f"{path} is not a regular file, so it cannot be hashed.")
            while count := file.readinto(buffer):
                yield buffer[:count]


@contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{path} cannot be read: {error.strerror}.") from error


def _state(path: Path) -> str:
    """Return what changes when a file does: its path, device, inode, size and times, as a key of the cache."""
    with _explain_read_errors(path):
        status = path.stat()
        values = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return json.dumps([str(path.resolve()), *values])


def _path_of(state: str) -> str:
    return str(json.loads(state)[0])


def _newest_time(state: str) -> int:
    return int(max(json.loads(state)[-2:]))


def _check_unchanged(files: Mapping[str, Path], states: Mapping[str, str]) -> None:
    for name, path in files.items():
        if _state(path) != states[name]:
            raise SmeltError(f"{path} changed while it was read; run again when nothing writes to it.")


def _cache_file() -> Path:
    return cache_folder() / "hashes.json"


def _load_cache() -> dict[str, str]:
    """Return the cached hashes by file state; a missing or damaged cache is empty."""
    with suppress(OSError, ValueError, RecursionError, AttributeError, TypeError, LookupError):
        if _cache_file().stat().st_size <= _MAX_CACHE_BYTES:
            content = json.loads(_cache_file().read_text(encoding="utf-8"))
            return {state: hashed for state, hashed in content.items() if _path_of(state) and isinstance(hashed, str)}
    return {}


def _save_cache(fresh: dict[str, str]) -> None:
    """Add hashes to the cache, dropping older states of the same paths; a cache that cannot be written is no error."""
    paths = {_path_of(state) for state in fresh}
    kept = {state: hashed for state, hashed in _load_cache().items() if _path_of(state) not in paths}
    content = dict(list({**kept, **fresh}.items())[-_MAX_CACHED:])
    with suppress(SmeltError, OSError):
        write_atomically(_cache_file(), lambda file: file.write_text(json.dumps(content), encoding="utf-8"))
