"""Checkpoints of a run, so that an interrupted run resumes and ends with the same bytes.

Safetensors and JSON only; every file is written atomically.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smelt.errors import SmeltError
from smelt.files import write_atomically


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
        if path is None or not path.exists():
            return None
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from error

    def save(self, name: str, tensors: dict[str, Tensor]) -> None:
        path = self._path(name, "safetensors")
        if path is not None:
            tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            write_atomically(path, lambda temporary: save_file(tensors, temporary))

    def load_facts(self, name: str) -> dict[str, Any] | None:
        """Return the plain data saved under a name, or None."""
        path = self._path(name, "json")
        if path is None or not path.exists():
            return None
        try:
            facts = json.loads(path.read_text())
        except (ValueError, OSError) as error:
            raise _damaged(path, error) from error
        if not isinstance(facts, dict):
            raise _damaged(path, "not a JSON object")
        return facts

    def save_facts(self, name: str, facts: dict[str, Any]) -> None:
        path = self._path(name, "json")
        if path is not None:
            write_atomically(path, lambda temporary: temporary.write_text(json.dumps(facts, indent=1)))

    def clear(self) -> None:
        if self.folder is not None and self.folder.exists():
            shutil.rmtree(self.folder)

    def _path(self, name: str, suffix: str) -> Path | None:
        assert re.fullmatch(r"[\w.-]+", name), name
        return None if self.folder is None else self.folder / f"{name}.{suffix}"


def _damaged(path: Path, reason: object) -> SmeltError:
    return SmeltError(f"{path} of the unfinished run is damaged ({reason}); remove {path.parent} and run again.")
