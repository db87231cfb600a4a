"""Data sets with a short name: a local copy in SMELT_DATA if there is one, otherwise the hub.

`wikitext2` is `$SMELT_DATA/wikitext2/test.raw.txt.gz` (for calibration: the training split), or the raw WikiText-2
from the hub.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NamedDataset:
    """Files of a data set by purpose, in order of preference, and its name on the hub."""

    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]
    hub: str


NAMED_DATASETS = {
    "wikitext2": NamedDataset(
        calibration=("train.raw.txt.gz", "train.txt.gz"),
        evaluation=("test.raw.txt.gz", "test.txt.gz"),
        hub="hub:Salesforce/wikitext:wikitext-2-raw-v1",
    ),
}


def resolve_source(source: str | Path, split: str) -> str | Path:
    """Return the file or hub data set that a short name stands for; any other source is returned unchanged."""
    dataset = NAMED_DATASETS.get(str(source))
    if dataset is None or Path(source).exists():
        return source
    folder = Path(os.environ.get("SMELT_DATA", ".")) / str(source)
    for name in dataset.calibration if split == "calibration" else dataset.evaluation:
        if (folder / name).is_file():
            return folder / name
    return f"{dataset.hub}@train" if split == "calibration" else f"{dataset.hub}@test"


def unknown_source(source: str) -> str:
    """Return the start of the error for a source that is neither a file nor a short name, with suggestions."""
    names = ["default", *NAMED_DATASETS]
    close = difflib.get_close_matches(source, names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{source} does not exist: no file and no data set has this name{hint}; give {', '.join(names)}"
