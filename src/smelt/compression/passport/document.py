"""The file `passport.json`: its content, and reading it from a folder that nobody vouches for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from smelt.compression.passport.signing import SIGNATURE
from smelt.errors import ModelError
from smelt.fingerprint import fingerprint_of
from smelt.models.json_file import read_object

PASSPORT = "passport.json"
VERSION = 1
MAX_FILES = 10_000
# They hold times, dates and the machine, so a second run writes other bytes.
NOT_REPRODUCIBLE = ("measurements.json", "report.html")

_NOT_LISTED = (PASSPORT, SIGNATURE)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_NAME = 1000


@dataclass(frozen=True)
class FileFacts:
    """The size and hash of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Passport:
    """What an artifact consists of, what it was made from, and how; everything is plain JSON data."""

    files: dict[str, FileFacts]  # by relative POSIX path; all but the passport and its signature
    source: dict[str, Any]  # the parent model: name, sha256, files, license
    recipe: dict[str, Any]
    seeds: dict[str, int]
    data: dict[str, Any]  # calibration and evaluation: name, kind, items, sha256
    choices: dict[str, Any]  # what searches decided: the batch size, and the choices of each step
    probe: dict[str, Any]  # the hash of the logits on fixed inputs, and what their last bits depend on
    measurements: dict[str, Any]  # sizes and quality, with intervals: equal in every run
    run: dict[str, Any] = field(default_factory=dict)  # not reproducible: versions, machine, date

    @property
    def hashes(self) -> dict[str, str]:
        return {name: facts.sha256 for name, facts in self.files.items()}

    @property
    def reproducible(self) -> dict[str, str]:
        """Return the hashes of the files that a repeated run must write again, byte for byte."""
        return {name: hashed for name, hashed in self.hashes.items() if name not in NOT_REPRODUCIBLE}

    @property
    def fingerprint(self) -> str:
        """Return one hash over the reproducible files."""
        return fingerprint_of(self.reproducible)

    def to_json(self) -> dict[str, Any]:
        return {"passport": VERSION, "fingerprint": self.fingerprint, **asdict(self)}


def read_passport(folder: Path) -> Passport:
    """Read and check the passport of a folder; the facts about its origin are claims until somebody signs them."""
    path = folder / PASSPORT
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give the folder of an artifact.")
    if not path.is_file():
        raise ModelError(f"{folder} has no {PASSPORT}; artifacts written by `smelt compress` have one since 0.2.")
    if path.is_symlink():
        raise ModelError(f"{path} is a symbolic link; a passport must be a plain file.")
    content = read_object(path)
    if content.get("passport") != VERSION:
        raise ModelError(f"{path} has an unknown version; this Smelt reads version {VERSION}.")
    sections = {
        name: content.get(name)
        for name in ("source", "recipe", "seeds", "data", "choices", "probe", "measurements", "run")
    }
    damaged = next((name for name, section in sections.items() if not isinstance(section, dict)), None)
    if damaged is not None:
        raise ModelError(f"{path} is damaged: `{damaged}` is missing or not an object.")
    return Passport(files=_read_files(content.get("files"), path), **sections)  # type: ignore[arg-type]


def passport_lines(passport: Passport) -> list[str]:
    """Return the passport in two lines; what it claims is shown shortened and in plain characters."""
    source, run = passport.source, passport.run
    steps = passport.recipe.get("steps")
    methods = [step.get("method") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    made = f"made from {_plain(source.get('name'))} ({_plain(source.get('sha256'))[:12]}) by {_plain(methods)}"
    versions = run.get("versions")
    version = versions.get("smelt") if isinstance(versions, dict) else None
    created = f"smelt {_plain(version)}, {_plain(run.get('created'))}"
    return [
        f"passport {passport.fingerprint[:12]}: {len(passport.files)} files, {made}",
        f"license of the source: {_plain(source.get('license'))}; {created}",
    ]


def _plain(value: Any) -> str:
    """Return a claim of an untrusted passport for the terminal."""
    if isinstance(value, list):
        return ", ".join(_plain(entry) for entry in value[:10]) or "nothing"
    return "".join(c if c.isprintable() else "?" for c in value[:100]) if isinstance(value, str) else "unknown"


def _read_files(content: Any, path: Path) -> dict[str, FileFacts]:
    if not isinstance(content, dict) or not content:
        raise ModelError(f"{path} is damaged: it lists no files.")
    if len(content) > MAX_FILES:
        raise ModelError(f"{path} lists {len(content)} files; more than {MAX_FILES} are no model.")
    files = {}
    for name, facts in content.items():
        if not _is_plain_name(name):
            raise ModelError(f"{path} lists {name!r:.100}, which is not a file inside the folder.")
        if not isinstance(facts, Mapping) or not _are_file_facts(facts):
            raise ModelError(f"{path} is damaged: {name!r:.100} needs its size in bytes and its sha256.")
        files[name] = FileFacts(facts["bytes"], facts["sha256"])
    return files


def _is_plain_name(name: str) -> bool:
    """Whether a name is a relative POSIX path that stays inside the folder and is written in one way only."""
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and len(name) <= _MAX_NAME
    return plain and not path.is_absolute() and ".." not in path.parts and str(path) == name and name not in _NOT_LISTED


def _are_file_facts(facts: Mapping[str, Any]) -> bool:
    size, hashed = facts.get("bytes"), facts.get("sha256")
    return type(size) is int and size >= 0 and isinstance(hashed, str) and _SHA256.fullmatch(hashed) is not None
