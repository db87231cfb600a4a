"""The work folder: one run at a time, nothing of the user's deleted, no damaged piece used."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import smelt.files
from smelt.compression.recipe import work_folder
from smelt.compression.recipe.work_folder import WorkFolder, check_output
from smelt.errors import SmeltError
from smelt.files import atomic_folder
from smelt.fingerprint import hash_folder

STEPS = [{"method": "a", "x": 1}, {"method": "b", "x": 2}]
INPUTS = {"weights": {"model.safetensors": "1"}, "calibration": "2", "evaluation": "3"}


def identity(steps: list[dict[str, Any]] = STEPS) -> dict[str, Any]:
    return {"recipe": {"seed": 0, "steps": steps}, "source": "model", "device": "cpu", "smelt": "1", "torch": "2"}


def manifest(steps: list[dict[str, Any]] = STEPS) -> dict[str, Any]:
    return {**identity(steps), **INPUTS}


def make(folder: Path, say: Callable[[str], None] = lambda _: None) -> WorkFolder:
    return WorkFolder(folder / "out", "model", say)


def started(folder: Path, steps: int) -> WorkFolder:
    """Return the work folder of a run with so many finished steps, killed in the next one."""
    work = make(folder)
    work.open(None, manifest())
    for position in range(steps):
        step = work.path / f"step-{position}"
        step.mkdir()
        (step / "model.safetensors").write_text(f"weights {position}")
        work.checkpoint.save_facts(step.name, {"record": {"name": position}, "files": hash_folder(step)})
    work.checkpoint.inside(f"step-{steps}-work").save("piece", {"a": torch.arange(4.0)})
    work.checkpoint.save("quality-before", {"losses": torch.ones(3)})
    work.checkpoint.save_facts("quality-before", {"value": 2.5})
    return work


def flip(file: Path, position: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("out", [".", "..", "/", "", "a/.."])
def test_an_output_that_names_no_folder(out: str) -> None:
    with pytest.raises(SmeltError, match="is not a new folder; give -o a name"):
        check_output(Path(out), "smollm2-135m")


def test_outputs_that_overlap_with_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "out.partial" / "step-0").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for source, out in (("model", "model/small"), ("model", "model"), ("link", "model/small"), ("model", "link/small")):
        with pytest.raises(SmeltError, match="lies inside the source model"):
            check_output(Path(out), source)
    for source, out in (("out.partial/step-0", "out"), ("out/model", "out"), ("file.gguf/x", "file.gguf")):
        with pytest.raises(SmeltError, match=r"the source model .* lies inside"):
            check_output(Path(out), source)
    (tmp_path / "file.gguf").touch()
    for source, out in (("model", "model-small"), ("file.gguf", "small"), ("link", "small"), ("org/name", "small")):
        check_output(Path(out), source)


def test_a_second_run_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with make(tmp_path).locked():
        with (
            pytest.raises(SmeltError, match=rf"out.partial is in use by process {os.getpid()} on ."),
            make(tmp_path).locked(),
        ):
            pass
        assert names(tmp_path) == {"out.partial"}
    assert not names(tmp_path)


def test_the_lock_file_names_its_present_holder_only(tmp_path: Path) -> None:
    lock = tmp_path / "out.partial" / ".smelt-lock"
    lock.parent.mkdir()
    lock.write_text("process 1 on a machine with a long name" * 4)
    with make(tmp_path).locked():
        assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_lock_on_a_deleted_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former holder deletes the file after this process opened it: another process would lock a new one."""
    lock, seen = smelt.files._lock, list[Path]()

    def lock_after_deletion(descriptor: int, path: Path) -> None:
        lock(descriptor, path)
        if not seen:
            path.unlink()
            path.parent.rmdir()
        seen.append(path)

    monkeypatch.setattr(smelt.files, "_lock", lock_after_deletion)
    with make(tmp_path).locked():
        assert len(seen) == 2
        with pytest.raises(SmeltError, match="is in use by"), make(tmp_path).locked():
            pass


def test_a_folder_that_is_deleted_while_it_is_checked_or_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run ends at that instant. `Path.mkdir` then finds the folder, but no longer when it looks what it is."""
    folder, access, mkdir, deleted = tmp_path / "out.partial", os.access, Path.mkdir, list[str]()

    def deleting_access(path: Path, mode: int) -> bool:
        if path == folder and not deleted:
            deleted.append("checked")
            folder.rmdir()
        return access(path, mode)

    def deleting_mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        if path == folder and deleted == ["checked"]:
            deleted.append("made")
            raise FileExistsError(errno.EEXIST, "File exists")
        mkdir(path, *arguments, **options)

    folder.mkdir()
    monkeypatch.setattr(os, "access", deleting_access)
    monkeypatch.setattr(Path, "mkdir", deleting_mkdir)
    with make(tmp_path).locked():
        assert names(folder) == {".smelt-lock"} and deleted == ["checked", "made"]


def test_runs_that_start_and_end_at_the_same_instant(tmp_path: Path) -> None:
    """However they meet, also at the last rename, exactly one run wins and no other touches its files."""
    for number in range(40):
        folder = tmp_path / str(number) / "new"
        outcomes: list[str] = []
        barrier = threading.Barrier(4)

        def run(folder: Path = folder, outcomes: list[str] = outcomes, barrier: threading.Barrier = barrier) -> None:
            work = make(folder)
            barrier.wait()
            try:
                with work.locked():
                    work.open(work.find_unfinished(identity(), resume=False), manifest())
                    with atomic_folder(work.out, inside=work.path) as temporary:
                        (temporary / "model").write_text("weights")
                    work.remove()
                    outcomes.append("done")
            except SmeltError as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count("done") == 1, outcomes
        told = [outcome for outcome in outcomes if outcome != "done"]
        assert len(told) == 3 and all("is in use by" in each or "exists already" in each for each in told), told
        assert names(folder) == {"out"} and names(folder / "out") == {"model"}


@pytest.mark.parametrize("own", [[".env"], [".git", ".env"], ["notes.txt"]])
def test_a_folder_of_the_user_is_not_touched(own: list[str], tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    for name in own:
        (tmp_path / "out.partial" / name).write_text("mine")
    with pytest.raises(SmeltError, match="is not an unfinished run"), make(tmp_path).locked():
        pass
    assert names(tmp_path / "out.partial") == set(own)
    assert {file.read_text() for file in (tmp_path / "out.partial").iterdir()} == {"mine"}


def test_a_run_killed_before_its_manifest_leaves_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / ".smelt-lock").write_text("process 1 on here")
    (tmp_path / "out.partial" / ".run.json.123.tmp").write_text("{")
    work = make(tmp_path)
    with work.locked():
        assert work.find_unfinished(identity(), resume=False) is None
    assert not names(tmp_path)


def test_files_of_the_user_beside_a_lock_file_stay(tmp_path: Path) -> None:
    folder = tmp_path / "out.partial"
    folder.mkdir()
    for name in (".smelt-lock", "notes.txt"):
        (folder / name).touch()
    work = make(tmp_path)
    with pytest.raises(SmeltError, match="is not an unfinished run"), work.locked():
        work.find_unfinished(identity(), resume=False)
    assert names(folder) == {"notes.txt"}


def test_folders_made_for_a_refused_run_are_removed(tmp_path: Path) -> None:
    with make(tmp_path / "a" / "b").locked():
        assert (tmp_path / "a" / "b" / "out.partial").is_dir()
    assert not names(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda"}, "its device differs"),
        ({"torch": "3"}, "its version of torch differs"),
        ({"recipe": {"seed": 1, "steps": STEPS}}, "its recipe differs"),
        ({"recipe": {"seed": 0, "steps": STEPS[1:]}}, "its recipe differs"),
    ],
)
def test_another_run_is_refused_with_what_differs(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    work = started(tmp_path, 1)
    with pytest.raises(SmeltError, match=words):
        work.find_unfinished({**identity(), **changes}, resume=True)


def test_changed_weights_and_data_are_named(tmp_path: Path) -> None:
    work = started(tmp_path, 1)
    unfinished = work.find_unfinished(identity(), resume=True)
    work.check_weights(unfinished, {"model.safetensors": "1"})
    with pytest.raises(SmeltError, match=r"source model has changed .* \(config.json and 1 more\)"):
        work.check_weights(unfinished, {"model.safetensors": "9", "config.json": "5"})
    for part in ("calibration", "evaluation"):
        with pytest.raises(SmeltError, match=f"the {part} data has changed"):
            work.open(unfinished, {**manifest(), part: "other"})


def test_finished_steps_are_returned(tmp_path: Path) -> None:
    work = started(tmp_path, 2)
    assert work.open(manifest(), manifest()) == [{"name": 0}, {"name": 1}]
    assert {"step-0", "step-1", "step-2-work", "quality-before.json"} <= names(work.path)


def test_temporary_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    work = started(tmp_path, 1)
    before = names(work.path)
    (work.path / "activations-0").mkdir()
    (work.path / ".step-0.json.123.tmp").touch()
    work.open(manifest(), manifest())
    assert names(work.path) == before


def test_a_finished_run_leaves_nothing(tmp_path: Path) -> None:
    work = make(tmp_path)
    with work.locked():
        started(tmp_path, 2)
        work.remove()
    assert not names(tmp_path)


def test_a_changed_later_step_keeps_the_earlier_ones(tmp_path: Path) -> None:
    work = started(tmp_path, 2)
    work.checkpoint.save_facts("quality-after", {"value": 3.0})
    steps = [STEPS[0], {"method": "c"}]
    unfinished = work.find_unfinished(identity(steps), resume=True)
    assert work.open(unfinished, manifest(steps)) == [{"name": 0}]
    assert not {"step-1", "step-1.json", "step-2-work", "quality-after.json"} & names(work.path)
    assert "quality-before.json" in names(work.path)
    assert work.checkpoint.load_facts("run") == manifest(steps)


def test_a_shortened_recipe_drops_the_steps_that_it_lacks(tmp_path: Path) -> None:
    work = started(tmp_path, 2)
    assert work.open(manifest(), manifest(STEPS[:1])) == [{"name": 0}]
    assert {name for name in names(work.path) if name.startswith("step-")} == {"step-0", "step-0.json"}


@pytest.mark.parametrize("deletions", range(1, 5))
def test_steps_that_were_discarded_in_part_are_not_taken_for_damaged(
    deletions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record goes before its folder and the latest step first, so that a killed process leaves whole steps."""
    work, deleted, delete = started(tmp_path, 2), list[Path](), work_folder._delete

    def delete_some(path: Path) -> None:
        if len(deleted) == deletions:
            raise KeyboardInterrupt
        deleted.append(path)
        delete(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(work_folder, "_delete", delete_some)
        work.open(manifest(), manifest([{"method": "c"}]))
    said: list[str] = []
    make(tmp_path, said.append).open(manifest(), manifest())
    assert not said


@pytest.mark.parametrize(
    ("file", "finished", "gone"),
    [
        ("step-1/model.safetensors", 1, {"step-1", "step-1.json", "step-2-work"}),
        ("step-1.json", 1, {"step-1", "step-1.json", "step-2-work"}),
        ("step-0.json", 0, {"step-0", "step-0.json", "step-1", "step-1.json", "step-2-work"}),
        ("step-2-work/piece.safetensors", 2, {"step-2-work"}),
        ("quality-before.json", 2, {"quality-before.json", "quality-before.safetensors"}),
        ("quality-before.safetensors", 2, {"quality-before.json", "quality-before.safetensors"}),
    ],
)
@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_pieces_are_discarded(file: str, finished: int, gone: set[str], damage: str, tmp_path: Path) -> None:
    """With all that was computed after them, and with a word to the user."""
    work = started(tmp_path, 2)
    content = (work.path / file).read_bytes()
    if damage == "flip":
        flip(work.path / file, len(content) * 3 // 4 if file.endswith("json") else -1)
    else:
        (work.path / file).write_bytes(content[:-3])
    before, said = names(work.path), list[str]()
    records = make(tmp_path, said.append).open(manifest(), manifest())
    assert len(records) == finished
    assert before - names(work.path) == gone
    assert len(said) == 1 and "damaged" in said[0]


def test_every_flipped_byte_of_a_piece_is_noticed_or_harmless(tmp_path: Path) -> None:
    checkpoint = make(tmp_path).checkpoint
    tensors = {"a": torch.arange(3, dtype=torch.bfloat16), "b": torch.tensor(5.0), "empty": torch.empty(0, 4)}
    checkpoint.save("piece", tensors)
    checkpoint.save_facts("piece", {"value": 1.25, "layers": {"a": [1, 2]}})
    for suffix in ("safetensors", "json"):
        file = tmp_path / "out.partial" / f"piece.{suffix}"
        whole = file.read_bytes()
        noticed = 0
        for position in range(len(whole)):
            flip(file, position)
            if checkpoint.find_damaged() is not None:
                noticed += 1
            elif suffix == "json":
                assert checkpoint.load_facts("piece") == {"value": 1.25, "layers": {"a": [1, 2]}}
            else:
                loaded = checkpoint.load("piece")
                assert loaded is not None and all(torch.equal(loaded[name], tensors[name]) for name in tensors)
            file.write_bytes(whole)
        assert noticed > 0.8 * len(whole)
