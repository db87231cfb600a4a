"""Check a folder against its passport and its signature; load it only when every file matches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smelt.compression.passport.document import PASSPORT, Passport
from smelt.compression.passport.origin import describe_run
from smelt.compression.passport.signing import SIGNATURE, SignatureError, signed_hashes
from smelt.errors import ModelError
from smelt.fingerprint import hash_files, list_files
from smelt.models.verify import probe_folder
from smelt.progress import Progress

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

_MAX_THREADS = 1024
_SHOWN = 5


@dataclass(frozen=True)
class FileChanges:
    """How the files of a folder differ from a list of hashes."""

    different: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    @property
    def none(self) -> bool:
        return not (self.different or self.missing or self.unexpected)

    def describe(self) -> str:
        """Return one line that names the first files of each kind."""
        kinds = {"different": self.different, "missing": self.missing, "unexpected": self.unexpected}
        return "; ".join(f"{kind}: {_names(names)}" for kind, names in kinds.items() if names)


@dataclass(frozen=True)
class FolderCheck:
    """The result of checking a folder. `problems` is empty if everything that was checked matches."""

    problems: tuple[str, ...]
    changes: FileChanges
    files: int
    total_bytes: int
    signature: str  # valid, not checked, none or invalid
    loaded: str = "not loaded"  # or: same logits, finite outputs, failed
    notes: tuple[str, ...] = field(default=())


def check_folder(
    folder: Path, passport: Passport, key: ec.EllipticCurvePublicKey | None, progress: Progress
) -> FolderCheck:
    """Compare files with the passport and, given a key, with the signature; then load the folder if all match.

    A file whose size differs is not read.
    """
    present = {name: path for name, path in list_files(folder).items() if name != SIGNATURE}
    has_signature = (folder / SIGNATURE).is_file()
    sizes = {name: path.stat().st_size for name, path in present.items()}
    wrong_size = {name for name, facts in passport.files.items() if sizes.get(name) not in (None, facts.bytes)}
    readable = {name: path for name, path in present.items() if name not in wrong_size}
    hashes = {**dict.fromkeys(wrong_size, "wrong size"), **hash_files(readable, progress=progress)}
    listed = {name: hashed for name, hashed in hashes.items() if name != PASSPORT}
    changes = changed_files(passport.hashes, listed)
    problems = [] if changes.none else [changes.describe()]
    signature, problem = _check_signature(folder, hashes, key) if key is not None else ("not checked", None)
    if key is None and not has_signature:
        signature = "none"
    problems += [problem] if problem else []
    if problems:
        return FolderCheck(tuple(problems), changes, len(listed), sum(sizes.values()), signature)
    loaded, problem, notes = _check_loading(folder, passport)
    problems += [problem] if problem else []
    return FolderCheck(tuple(problems), changes, len(listed), sum(sizes.values()), signature, loaded, notes)


def changed_files(expected: Mapping[str, str], actual: Mapping[str, str]) -> FileChanges:
    """Compare two mappings from file names to hashes."""
    common = expected.keys() & actual.keys()
    return FileChanges(
        different=tuple(sorted(name for name in common if expected[name] != actual[name])),
        missing=tuple(sorted(expected.keys() - actual.keys())),
        unexpected=tuple(sorted(actual.keys() - expected.keys())),
    )


def environment_differences(passport: Passport) -> list[str]:
    """List what is different here from the run in the passport and may change the last bits of results."""
    run = passport.run
    here = describe_run(str(run.get("device")), bool(run.get("offload")), "")
    differences = []
    for section, names in (("versions", tuple(here["versions"])), ("machine", ("cpu", "os", "gpu"))):
        recorded = run.get(section)
        recorded = recorded if isinstance(recorded, dict) else {}
        for name in names:
            before, now = recorded.get(name), here[section].get(name)
            if before != now and not (name == "gpu" and here["device"] == "cpu"):
                differences.append(f"{name} {_shown(before)} then, {_shown(now)} now")
    return differences


def recorded_threads(passport: Passport) -> int:
    """Return the number of threads of the run, which decides the last bits of sums."""
    threads = passport.probe.get("threads")
    if type(threads) is not int or not 0 < threads <= _MAX_THREADS:
        raise ModelError(f"the passport is damaged: it records {_shown(threads)} threads.")
    return threads


def _check_signature(folder: Path, hashes: Mapping[str, str], key: ec.EllipticCurvePublicKey) -> tuple[str, str | None]:
    """Return the state of the signature, and what is wrong with it."""
    path = folder / SIGNATURE
    if not path.is_file():
        return "none", f"there is no {SIGNATURE}, so the folder is not signed"
    try:
        signed = signed_hashes(path, key)
    except SignatureError as error:
        return "invalid", str(error).rstrip(".")
    changes = changed_files(signed, hashes)
    if not changes.none:
        return "invalid", f"the signature is for other files: {changes.describe()}"
    return "valid", None


def _check_loading(folder: Path, passport: Passport) -> tuple[str, str | None, tuple[str, ...]]:
    """Load the folder in a new process; compare its outputs if this machine computes the same bits."""
    recorded = passport.probe
    differences = environment_differences(passport)
    device = str(recorded.get("device"))
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        differences.append(f"device {_shown(device)} then, cpu now")
        device = "cpu"
    try:
        here = probe_folder(
            folder, device=device, threads=recorded_threads(passport), onednn=recorded.get("onednn") is True
        )
    except ModelError as error:
        return "failed", str(error).rstrip("."), ()
    if here["shape"] != recorded.get("shape"):
        return "failed", f"the model computes outputs of shape {here['shape']}, which the passport does not say", ()
    if here["finite"] is not True and recorded.get("finite") is True:
        return "failed", "the model computes NaN or infinity", ()
    if differences:
        return "finite outputs", None, (f"logits are not compared: {'; '.join(differences)}",)
    if here["sha256"] != recorded.get("sha256"):
        return "failed", "the model computes other logits than the passport says", ()
    return "same logits", None, ()


def _names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(ascii(name)[1:-1] for name in names[:_SHOWN]) + more


def _shown(value: Any) -> str:
    """Return an untrusted value for a message: short, in one line."""
    return f"{value!s:.60}".encode("unicode_escape").decode("ascii") if isinstance(value, str | int) else "unknown"
