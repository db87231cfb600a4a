"""The work folder `OUT.partial` of a run: its lock, its manifest, and the finished steps in it.

One process at a time may use it. The manifest `run.json` holds what the run was started with: recipe, source, device,
versions, and fingerprints of weights and data. A run is resumed only if they are unchanged; only steps that have not
finished may differ. A piece that was damaged is discarded together with everything that was computed after it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from smelt.compression.checkpoint import Checkpoint, DamagedCheckpointError
from smelt.errors import SmeltError
from smelt.files import check_writable, locked
from smelt.fingerprint import hash_folder
from smelt.models.bundled import BUNDLED

LOCK = ".smelt-lock"
MANIFEST = "run"
_OWN_FILES = re.compile(rf"{re.escape(LOCK)}|\.run\.json\.\d+\.tmp")  # of a run that was killed before its manifest
_WORDS = {"smelt": "version of Smelt", "torch": "version of torch"}

Manifest = dict[str, Any]
Say = Callable[[str], None]


def check_output(out: Path, source: str) -> None:
    """Refuse an output path that names no new folder, and one that overlaps with the source model."""
    if out.name in ("", ".", ".."):
        raise SmeltError(f"{out} is not a new folder; give -o a name that does not exist yet, such as {out / 'small'}.")
    model, target = Path(source).expanduser().resolve(), out.resolve()
    if source in BUNDLED:  # before a folder of that name
        return
    if model.is_dir() and target.is_relative_to(model):
        raise SmeltError(f"{out} lies inside the source model {source}; choose a folder outside of it.")
    if model.is_relative_to(target) or model.is_relative_to(_work_path(target)):
        raise SmeltError(f"the source model {source} lies inside {out}; choose another folder.")


class WorkFolder:
    """The folder next to the result in which a run keeps its finished work."""

    def __init__(self, out: Path, source: str, say: Say) -> None:
        check_output(out, source)
        self.out, self.path, self._say = out, _work_path(out), say
        self.checkpoint = Checkpoint(self.path)
        self.manifest: Manifest = {}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; a folder in which no run was started is removed again."""
        check_writable(self.out)
        check_writable(self.path / "run.json")
        names = self._names()
        if LOCK not in names:  # otherwise a run may be at work in it: decided under the lock
            self._check_is_own(names)
        missing = [parent for parent in self.path.parents if not parent.exists()]
        with locked(self.path / LOCK):
            try:
                yield
            finally:
                if not (self.path / "run.json").exists():
                    self._remove_own_files()
                    with suppress(OSError):  # not empty: the result is there
                        for parent in missing:
                            parent.rmdir()

    def find_unfinished(self, identity: Manifest, resume: bool) -> Manifest | None:
        """Return the manifest of the interrupted run to resume, if any; refuse a folder that is in the way."""
        if os.path.lexists(self.out):
            raise SmeltError(f"{self.out} exists already; choose another folder or remove it.")
        self._check_is_own(self._names())
        unfinished = self.checkpoint.load_facts(MANIFEST)
        if unfinished is None and resume:
            raise SmeltError(f"there is nothing to resume at {self.path}; run without --resume to start.")
        if unfinished is not None and not resume:
            raise SmeltError(f"{self.path} holds an unfinished run; add --resume to continue it, or remove it.")
        if unfinished is not None:
            self._check_identity(identity, unfinished)
        return unfinished

    def check_weights(self, unfinished: Manifest | None, weights: dict[str, str]) -> None:
        """Refuse to resume with other weights than those the run was started with."""
        if unfinished is None or unfinished.get("weights") == weights:
            return
        before = unfinished.get("weights") or {}
        changed = sorted(name for name in before | weights if before.get(name) != weights.get(name))
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise SmeltError(
            f"the source model has changed since the run in {self.path} was started ({changed[0]}{more}); restore it, "
            "or remove that folder and start over."
        )

    def open(self, unfinished: Manifest | None, manifest: Manifest) -> list[Manifest]:
        """Start the run, or continue an interrupted one whose data is unchanged; return its finished steps."""
        self.manifest = manifest
        if unfinished is None:
            self.checkpoint.save_facts(MANIFEST, manifest)
            return []
        for part in ("calibration", "evaluation"):
            if unfinished.get(part) != manifest[part]:
                raise SmeltError(
                    f"the {part} data has changed since the unfinished run in {self.path}; restore it, or remove that "
                    "folder and start over."
                )
        for leftover in (*self.path.glob("activations-*"), *self.path.glob(".*.tmp")):
            _delete(leftover)
        if unfinished["recipe"] != manifest["recipe"]:
            self._discard_steps(_equal_steps(unfinished, manifest))
            self.checkpoint.save_facts(MANIFEST, manifest)
        return self._finished_steps(len(manifest["recipe"]["steps"]))

    def remove(self) -> None:
        """Remove everything. The manifest goes last, so that a process killed meanwhile leaves an unfinished run."""
        last = ("run.json", LOCK)
        for entry in [entry for entry in self.path.iterdir() if entry.name not in last]:
            _delete(entry)
        (self.path / "run.json").unlink(missing_ok=True)
        self._remove_own_files()

    def has_finished_steps(self) -> bool:
        return (self.path / "step-0.json").exists()

    def _check_is_own(self, names: list[str]) -> None:
        """Refuse a folder that no run made. It may hold what a run leaves that was killed before its manifest."""
        if "run.json" not in names and any(not _OWN_FILES.fullmatch(name) for name in names):
            raise SmeltError(f"{self.path} exists and is not an unfinished run; remove it or choose another folder.")

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError):
            return [entry.name for entry in self.path.iterdir()]
        return []

    def _check_identity(self, identity: Manifest, unfinished: Manifest) -> None:
        """Refuse another run; only later steps may differ, because what was finished does not depend on them."""
        different = [key for key in identity if unfinished.get(key) != identity[key]]
        recipe, earlier = dict(identity["recipe"]), dict(unfinished.get("recipe", {}))
        if different == ["recipe"] and _equal_steps(unfinished, identity):
            recipe.pop("steps"), earlier.pop("steps")
            different = [] if recipe == earlier else different
        if different:
            word = _WORDS.get(different[0], different[0])
            raise SmeltError(
                f"{self.path} holds an unfinished run of something else (its {word} differs); remove it, or repeat "
                "that run."
            )

    def _finished_steps(self, total: int) -> list[Manifest]:
        """Return the records of the finished steps, after discarding what is damaged."""
        for name in ("quality-before", "quality-after"):
            self._discard_damaged_quality(name)
        records: list[Manifest] = []
        files: dict[str, str] = {}
        for position in range(total):
            facts = self._undamaged_facts(position)
            if facts is None:
                break
            records.append(facts["record"])
            files = facts["files"]
        while records and not self._is_intact(self.path / f"step-{len(records) - 1}", files):
            self._say(f"the result of step {len(records)} is damaged; it is computed again")
            records.pop()
            self._discard_steps(len(records))
            facts = self.checkpoint.load_facts(f"step-{len(records) - 1}") if records else None
            files = facts["files"] if facts else {}
        work = self.checkpoint.inside(f"step-{len(records)}-work")
        damaged = work.find_damaged()
        if damaged is not None:
            self._say(f"{damaged.name} of step {len(records) + 1} is damaged; the step starts over")
            work.clear()
        return records

    def _undamaged_facts(self, position: int) -> Manifest | None:
        try:
            return self.checkpoint.load_facts(f"step-{position}")
        except DamagedCheckpointError:
            self._say(f"the record of step {position + 1} is damaged; the step is computed again")
            self._discard_steps(position)
            return None

    def _discard_damaged_quality(self, name: str) -> None:
        try:
            self.checkpoint.load(name)
            self.checkpoint.load_facts(name)
        except DamagedCheckpointError:
            self._say(f"{name} is damaged; it is measured again")
            for file in self.path.glob(f"{name}.*"):
                file.unlink()

    def _discard_steps(self, first: int) -> None:
        """Remove steps from a position on, the latest first, and the measurement of their result."""
        for file in self.path.glob("quality-after.*"):
            file.unlink()
        entries = [(int(match[1]), path) for path in self.path.iterdir() if (match := _step_number(path))]
        for position, path in sorted(entries, key=lambda entry: (-entry[0], entry[1].suffix != ".json")):
            if position >= first:
                _delete(path)

    def _is_intact(self, folder: Path, files: dict[str, str]) -> bool:
        return folder.is_dir() and hash_folder(folder) == files

    def _remove_own_files(self) -> None:
        with suppress(OSError):  # not empty: another run has entered since the lock file went
            for entry in self.path.iterdir():
                if _OWN_FILES.fullmatch(entry.name) and entry.name != LOCK:
                    entry.unlink(missing_ok=True)
            (self.path / LOCK).unlink(missing_ok=True)
            self.path.rmdir()


def _work_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _step_number(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"step-(\d+)(-work|\.json)?", path.name)


def _equal_steps(first: Manifest, second: Manifest) -> int:
    """Return how many steps at the start of two recipes are equal."""
    steps = [manifest.get("recipe", {}).get("steps", []) for manifest in (first, second)]
    differences = (position for position, (left, right) in enumerate(zip(*steps, strict=False)) if left != right)
    return next(differences, min(map(len, steps)))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
