"""Hashes of files and folders: the right bytes, bounded memory, a cache that never returns the hash of other bytes."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from smelt import fingerprint
from smelt.errors import SmeltError
from smelt.fingerprint import CHUNK_BYTES, fingerprint_of, hash_file, hash_files, hash_folder


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -(10**15))  # files of this test are new, which would not be cached
    return tmp_path / "cache" / "hashes.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_bytes(b"one")
    (folder / "sub" / "b").write_bytes(b"two")
    (folder / ".hidden").write_bytes(b"")
    return folder


class CountedProgress:
    """Counts what it is told to track."""

    def __init__(self) -> None:
        self.steps, self.total = 0, 0

    def track(self, items, description, total=None):  # type: ignore[no-untyped-def]
        self.total = total
        for item in items:
            self.steps += 1
            yield item


def test_a_folder_is_hashed_by_relative_path(folder: Path) -> None:
    assert hash_folder(folder) == {".hidden": sha256(b""), "a": sha256(b"one"), "sub/b": sha256(b"two")}


def test_a_file_of_several_chunks_is_read_with_bounded_memory(tmp_path: Path) -> None:
    content = os.urandom(1000) * (3 * CHUNK_BYTES // 1000) + bytes(1000)
    expected, size = sha256(content), len(content)
    path = tmp_path / "file"
    path.write_bytes(content)
    del content
    progress = CountedProgress()
    tracemalloc.start()
    try:
        assert hash_file(path) == expected
        assert hash_files({"x": path, "y": path}, progress=progress) == {"x": expected, "y": expected}
        assert tracemalloc.get_traced_memory()[1] < 2.5 * CHUNK_BYTES < size
    finally:
        tracemalloc.stop()
    assert progress.steps == progress.total == 8


def test_the_fingerprint_depends_on_names_and_hashes_but_not_on_order() -> None:
    first = fingerprint_of({"a": "1", "b": "2"})
    assert first == fingerprint_of({"b": "2", "a": "1"})
    others = [{"a": "2", "b": "1"}, {"a": "1"}, {"a": "1", "c": "2"}, {"a": '1"],["b', "b": "2"}]
    assert len({first, *map(fingerprint_of, others)}) == 5


def test_a_link_is_refused_or_followed_to_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"three")
    (folder / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(SmeltError, match="link is a symbolic link"):
        hash_folder(folder)
    assert hash_folder(folder, follow_links=True)["link"] == sha256(b"three")
    (folder / "folder").symlink_to(tmp_path)
    with pytest.raises(SmeltError, match="folder is a symbolic link"):
        hash_folder(folder, follow_links=True)


def test_a_pipe_is_refused_and_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(SmeltError, match="pipe is neither a file nor a folder"):
        hash_folder(folder)
    with pytest.raises(SmeltError, match="not a regular file"):
        hash_file(folder / "pipe")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SmeltError, match="gone cannot be read"):
        hash_files({"gone": tmp_path / "gone"})


def test_the_cache_saves_reading_and_changes_with_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hash_folder(folder, cache=True)
    read: list[Path] = []
    chunks = fingerprint._chunks
    monkeypatch.setattr(fingerprint, "_chunks", lambda path: (read.append(path), chunks(path))[1])
    assert hash_folder(folder, cache=True) == first
    assert read == []
    before = (folder / "a").stat()
    (folder / "a").write_bytes(b"eno")
    os.utime(folder / "a", ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, inode and time
    assert hash_folder(folder, cache=True) == {**first, "a": sha256(b"eno")}
    assert read == [folder / "a"]
    assert hash_folder(folder) == {**first, "a": sha256(b"eno")}
    assert len(read) == 4  # without the cache, all are read


def test_a_file_that_changed_just_now_is_not_cached(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 10**15)
    hash_folder(folder, cache=True)
    assert not cache.exists()


def test_an_old_modification_time_does_not_hide_a_change_just_now(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools that unpack or copy files set it; the kernel's own time of the change cannot be set."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 10**15)
    for path in (folder / "a", folder / "sub" / "b", folder / ".hidden"):
        os.utime(path, (1, 1))
    hash_folder(folder, cache=True)
    assert not cache.exists()


@pytest.mark.parametrize("damage", ["", "[]", '{"a": 1}', '{"[1": "x"}', "[" * 100_000, '{"[]": "x"}'])
def test_a_damaged_cache_counts_as_empty(folder: Path, cache: Path, damage: str) -> None:
    cache.parent.mkdir()
    cache.write_text(damage)
    expected = hash_folder(folder)
    assert hash_folder(folder, cache=True) == expected
    assert len(json.loads(cache.read_text())) == 3


def test_a_file_that_changes_while_it_is_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = fingerprint._chunks

    def change(path: Path):  # type: ignore[no-untyped-def]
        yield from chunks(path)
        with path.open("ab") as file:
            file.write(b"x")

    monkeypatch.setattr(fingerprint, "_chunks", change)
    with pytest.raises(SmeltError, match="changed while it was read"):
        hash_folder(folder, cache=True)
