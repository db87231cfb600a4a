"""Files and folders are written atomically, and write errors are one sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from smelt.compression.checkpoint import Checkpoint
from smelt.errors import ResourceError, SmeltError
from smelt.files import atomic_folder, check_writable, explain_disk_errors, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "file"
    write_atomically(file, lambda temporary: temporary.write_text("old"))

    def fail(temporary: Path) -> None:
        temporary.write_text("half of the n")
        raise ValueError

    with pytest.raises(ValueError):
        write_atomically(file, fail)
    assert file.read_text() == "old" and names(file.parent) == ["file"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_folder_appears_when_it_is_complete(inside: bool, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    folder = tmp_path / "work" if inside else None
    with atomic_folder(tmp_path / "out", folder) as temporary:
        (temporary / "file").write_text("content")
        assert temporary.parent == (folder or tmp_path) and not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "file").read_text() == "content"
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "other", folder) as temporary:
        (temporary / "file").write_text("content")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["out", "work"] and names(tmp_path / "work") == []


def test_files_of_a_folder_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").write_text("")
    with atomic_folder(tmp_path / "out") as temporary:
        (temporary / "model.safetensors").touch(mode=0o600)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("plain/file", "out/model.safetensors")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_os_errors_become_one_sentence(error: Exception, words: str) -> None:
    with pytest.raises(ResourceError, match=words), explain_disk_errors(Path("result")):
        raise error


@pytest.mark.parametrize("error", [ValueError("anything"), SmeltError("a sentence already")])
def test_other_errors_pass_through(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), explain_disk_errors(Path("result")):
        raise error


def test_output_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_writable(tmp_path / "new" / "deep" / "out")
    check_writable(tmp_path / "file")
    for bad in (tmp_path / "file" / "out", tmp_path / "file" / "deep" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(ResourceError, match="could not be written"):
            check_writable(bad)
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ResourceError, match="may not be written to"):
        check_writable(tmp_path / "out")


class TestCheckpoint:
    TENSORS = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.tensor([1, 2])}
    FACTS = {"number": 0.1, "words": ["é"], "nothing": None}

    def test_a_checkpoint_round_trips(self, tmp_path: Path) -> None:
        kept = Checkpoint(tmp_path / "work").inside("step-0")
        assert kept.load("piece") is None and kept.load_facts("facts") is None
        kept.save("piece", self.TENSORS)
        kept.save_facts("facts", self.FACTS)
        repeated = Checkpoint(tmp_path / "work").inside("step-0")
        loaded = repeated.load("piece")
        assert loaded is not None and loaded.keys() == self.TENSORS.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in self.TENSORS.items())
        assert repeated.load_facts("facts") == self.FACTS
        repeated.clear()
        assert not (tmp_path / "work" / "step-0").exists()

    def test_without_a_folder_nothing_is_saved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        kept = Checkpoint().inside("step-0")
        kept.save("piece", self.TENSORS)
        kept.save_facts("facts", self.FACTS)
        kept.clear()
        assert kept.load("piece") is None and kept.load_facts("facts") is None and names(tmp_path) == []

    @pytest.mark.parametrize("damage", [b"", b"{", b"[1, 2]", b"\xff" * 100])
    def test_a_damaged_checkpoint_file_is_named(self, damage: bytes, tmp_path: Path) -> None:
        kept = Checkpoint(tmp_path)
        readers: dict[str, Any] = {"a.safetensors": kept.load, "a.json": kept.load_facts}
        for name, read in readers.items():
            (tmp_path / name).write_bytes(damage)
            with pytest.raises(SmeltError, match=f"{name} of the unfinished run is damaged"):
                read("a")
