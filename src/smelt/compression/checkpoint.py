"""Checkpoints of a run, so that an interrupted run resumes and ends with the same bytes.

Safetensors and JSON only; every file is written atomically and carries the sha256 of its content, so that a piece that
was damaged on disk is never used.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from smelt.errors import ModelError, SmeltError
from smelt.files import write_atomically

_CHECKSUM = "sha256"


class DamagedCheckpointError(SmeltError):
    """A file of the unfinished run is not what was written."""


class Checkpoint:
    """A folder of named results. Without a folder nothing is saved."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def inside(self, name: str) -> Checkpoint:
        """Return a nested checkpoint for one step."""
        return Checkpoint(None if self.folder is None else self.folder / name)

    def load(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors saved under a name, or None."""
        path = self._path(name, "safetensors")
        return None if path is None or not path.exists() else _read_tensors(path)

    def save(self, name: str, tensors: dict[str, Tensor]) -> None:
        path = self._path(name, "safetensors")
        if path is not None:
            tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            metadata = {_CHECKSUM: _tensor_checksum(tensors)}
            write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))

    def load_facts(self, name: str) -> dict[str, Any] | None:
        """Return the plain data saved under a name, or None."""
        path = self._path(name, "json")
        return None if path is None or not path.exists() else _read_facts(path)

    def save_facts(self, name: str, facts: dict[str, Any]) -> None:
        path = self._path(name, "json")
        if path is not None:
            assert _CHECKSUM not in facts
            try:
                text = json.dumps({**facts, _CHECKSUM: _facts_checksum(facts)}, indent=1, allow_nan=False)
            except ValueError as error:
                raise ModelError(f"a value of {name} is NaN or infinite, so the run cannot go on.") from error
            write_atomically(path, lambda temporary: temporary.write_text(text))

    def find_damaged(self) -> Path | None:
        """Return the first file of the folder that is not what was written, or None."""
        for path in self._files():
            try:
                _read_facts(path) if path.suffix == ".json" else _read_tensors(path)
            except DamagedCheckpointError:
                return path
        return None

    def clear(self) -> None:
        if self.folder is not None and self.folder.exists():
            shutil.rmtree(self.folder)

    def _files(self) -> Iterator[Path]:
        if self.folder is not None and self.folder.is_dir():
            files = sorted(path for path in self.folder.iterdir() if not path.name.startswith("."))
            yield from (path for path in files if path.suffix in (".json", ".safetensors"))

    def _path(self, name: str, suffix: str) -> Path | None:
        assert re.fullmatch(r"[\w.-]+", name), name
        return None if self.folder is None else self.folder / f"{name}.{suffix}"


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            expected = (file.metadata() or {}).get(_CHECKSUM)
        tensors = dict(load_file(path))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error
    if _tensor_checksum(tensors) != expected:
        raise _damaged(path, "its checksum differs")
    return tensors


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from error
    if not isinstance(facts, dict):
        raise _damaged(path, "not a JSON object")
    expected = facts.pop(_CHECKSUM, None)
    if _facts_checksum(facts) != expected:
        raise _damaged(path, "its checksum differs")
    return facts


def _tensor_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names, dtypes, shapes and values of contiguous tensors on CPU."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _facts_checksum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _damaged(path: Path, reason: object) -> DamagedCheckpointError:
    words = " ".join(str(reason).split())
    return DamagedCheckpointError(
        f"{path} of the unfinished run is damaged ({words}); remove {path.parent} and run again."
    )
