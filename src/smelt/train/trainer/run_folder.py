"""The folder of a run: `run.json` (metadata), `run.jsonl` (one line per step), checkpoints and the trained model.

The log is written line by line. A resumed run first drops the lines after its checkpoint.
"""

from __future__ import annotations

import json
from os import SEEK_END
from pathlib import Path
from typing import Any

from smelt.errors import ConfigError, DataError
from smelt.files import check_writable, explain_disk_errors, write_atomically
from smelt.train.trainer.config import TrainConfig

METADATA, LOG, CHECKPOINTS, MODEL = "run.json", "run.jsonl", "checkpoints", "model"
FORMAT = 1
_TAIL_BYTES = 1 << 16  # a line has less than a thousand
_RENAMED_LOG_KEYS = {  # of runs written by 0.1
    "rate": "lr",
    "norm": "grad_norm",
    "all_bytes": "total_bytes",
    "inside": "intra_node_bytes",
}
_RENAMED_METADATA_KEYS = {"workers": "world_size"}
_RENAMED_DECISION_KEYS = {"vectors": "buckets", "rest": "other_seconds"}


class RunFolder:
    """Written by rank 0 only; read by all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.model = path / MODEL

    def exists(self) -> bool:
        """Return whether the folder holds a run."""
        return (self.path / METADATA).is_file()

    def check_usable(self, config: TrainConfig, resume: bool) -> None:
        """Refuse to overwrite a run, to write among other files, or to resume with another configuration."""
        check_writable(self.path / METADATA)
        if self.exists():
            if not resume:
                raise ConfigError(f"{self.path} holds a run already; give --resume to continue it, or another --out.")
            config.check_same_run(self.read_metadata().get("config"), self.path)
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise ConfigError(f"{self.path} is not empty and holds no run; give another --out.")

    def read_metadata(self) -> dict[str, Any]:
        metadata = _read_json(self.path / METADATA)
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            raise DataError(f"{self.path / METADATA} does not describe a run that this version can read.")
        metadata = _rename_keys(metadata, _RENAMED_METADATA_KEYS)
        if isinstance(metadata.get("decision"), dict):
            metadata["decision"] = _rename_keys(metadata["decision"], _RENAMED_DECISION_KEYS)
        return metadata

    def write_metadata(self, metadata: dict[str, Any]) -> None:
        text = json.dumps({"format": FORMAT, **metadata}, indent=1) + "\n"
        write_atomically(self.path / METADATA, lambda path: path.write_text(text, encoding="utf-8"))

    def read_log(self) -> list[dict[str, Any]]:
        """Return the entries of all steps; a line that was cut off when its process died is dropped."""
        try:
            text = (self.path / LOG).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path / LOG} cannot be read ({error}).") from error
        return [_parse_entry(line, self.path / LOG) for line in text.split("\n")[:-1]]

    def last_log_entry(self) -> dict[str, Any] | None:
        """Return the newest complete entry without reading the others; None if there is none."""
        try:
            with (self.path / LOG).open("rb") as file:
                file.seek(max(0, file.seek(0, SEEK_END) - _TAIL_BYTES))
                complete = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        return _parse_entry(complete[-1].decode("utf-8"), self.path / LOG) if complete else None

    def truncate_log(self, last_step: int) -> None:
        """Keep the entries of steps up to `last_step`."""
        lines = [json.dumps(entry) + "\n" for entry in self.read_log() if entry["step"] <= last_step]
        write_atomically(self.path / LOG, lambda path: path.write_text("".join(lines), encoding="utf-8"))

    def append_log(self, entry: dict[str, Any]) -> None:
        with explain_disk_errors(self.path / LOG), (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def format_log_entry(entry: dict[str, Any], steps: int) -> str:
    """Format an entry of the log for the terminal."""
    traffic = f", {entry['bytes'] / 1e6:.3g} MB/step" if entry["bytes"] else ""  # none on a single rank
    progress = f"step {entry['step']:,} of {steps:,}: loss {entry['loss']:.4f}{traffic}"
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in entry.get("evaluation", {}).items())
    return f"{progress}, {entry['seconds']:.1f} s" + (f"; held out: {metrics}" if metrics else "")


def format_low_precision(facts: dict[str, Any]) -> str:
    """Format the layers and GEMMs in FP8 for the terminal."""
    layers, kept = facts["converted"], len(facts["kept"])
    return (
        f"FP8: {layers} of {layers + kept} layers; {100 * facts['fp8']:.1f} % of the GEMM FLOPs with FP8 instructions, "
        f"{100 * facts['emulated']:.1f} % emulated"
    )


def _parse_entry(line: str, path: Path) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path} has a line that is not JSON ({error}).") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
        raise DataError(f"{path} has a line that is no step of a run.")
    return _rename_keys(entry, _RENAMED_LOG_KEYS)


def _rename_keys(content: dict[str, Any], renamed: dict[str, str]) -> dict[str, Any]:
    return {renamed.get(key, key): value for key, value in content.items()}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the folder of a training run.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
