"""The folder of a run: `run.json` (what was run, and where), `run.jsonl` (a line a step), checkpoints, the model.

The log is written line by line. A run that goes on from a checkpoint first drops the lines of later steps.
"""

from __future__ import annotations

import json
from os import SEEK_END
from pathlib import Path
from typing import Any

from smelt.errors import ConfigError, DataError
from smelt.files import check_writable, explain_disk_errors, write_atomically
from smelt.train.trainer.config import TrainConfig

FACTS, LINES, CHECKPOINTS, MODEL = "run.json", "run.jsonl", "checkpoints", "model"
FORMAT = 1
_TAIL = 1 << 16  # bytes; a line has less than a thousand


class RunFolder:
    """Written by the first worker only; read by all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.model = path / MODEL

    def exists(self) -> bool:
        return (self.path / FACTS).is_file()

    def require_free(self, resume: bool) -> None:
        """Refuse to write over a run, or into a folder of something else."""
        check_writable(self.path / FACTS)
        if self.exists() and not resume:
            raise ConfigError(f"{self.path} holds a run already; give --resume to go on with it, or another --out.")
        if self.path.is_dir() and not self.exists() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and holds no run; give another --out.")

    def check_usable(self, config: TrainConfig, resume: bool) -> None:
        """Free, or with a run that was begun as this one."""
        self.require_free(resume)
        if self.exists():
            config.require_same(self.read_metadata().get("config"), self.path)

    def read_metadata(self) -> dict[str, Any]:
        found = _read_json(self.path / FACTS)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise DataError(f"{self.path / FACTS} is of no run that this version can read.")
        return found

    def write_metadata(self, facts: dict[str, Any]) -> None:
        text = json.dumps({"format": FORMAT, **facts}, indent=1) + "\n"
        write_atomically(self.path / FACTS, lambda path: path.write_text(text, encoding="utf-8"))

    def read_log(self) -> list[dict[str, Any]]:
        """Of a line that was being written when its process died nothing is kept."""
        try:
            text = (self.path / LINES).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path / LINES} cannot be read ({error}).") from error
        return [_parsed(line, self.path / LINES) for line in text.split("\n")[:-1]]

    def last_log_entry(self) -> dict[str, Any] | None:
        """The newest that is whole, without reading the others; None while there is none."""
        try:
            with (self.path / LINES).open("rb") as file:
                file.seek(max(0, file.seek(0, SEEK_END) - _TAIL))
                whole = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        return _parsed(whole[-1].decode("utf-8"), self.path / LINES) if whole else None

    def truncate_log(self, last: int) -> None:
        """Those of steps up to `last`."""
        kept = [json.dumps(line) + "\n" for line in self.read_log() if line["step"] <= last]
        write_atomically(self.path / LINES, lambda path: path.write_text("".join(kept), encoding="utf-8"))

    def append_log(self, line: dict[str, Any]) -> None:
        with explain_disk_errors(self.path / LINES), (self.path / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def format_log_entry(line: dict[str, Any], steps: int) -> str:
    """A line of the log for people."""
    told = f"  step {line['step']:,} of {steps:,}: loss {line['loss']:.4f}, {line['bytes'] / 1e6:.3g} MB a step"
    measured = ", ".join(f"{name} {value:.4g}" for name, value in line.get("evaluation", {}).items())
    return f"{told}, {line['seconds']:.1f} s" + (f"; held out: {measured}" if measured else "")


def _parsed(line: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path} has a line that is no JSON ({error}).") from error
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        raise DataError(f"{path} has a line that is no step of a run.")
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} is not there; give the folder of a training run.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
