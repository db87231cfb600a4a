"""Data sets by a short name: a local copy under SMELT_DATA where there is one, else the hub.

`wikitext2` is `$SMELT_DATA/wikitext2/test.raw.txt.gz` (to calibrate on: the training split), or the raw WikiText-2 of
the hub.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Known:
    """Where a data set lies: files by purpose, in the order of preference, and its name on the hub."""

    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]
    hub: str


KNOWN = {
    "wikitext2": Known(
        calibration=("train.raw.txt.gz", "train.txt.gz"),
        evaluation=("test.raw.txt.gz", "test.txt.gz"),
        hub="hub:Salesforce/wikitext:wikitext-2-raw-v1",
    ),
}


def resolve_source(source: str | Path, split: str) -> str | Path:
    """The source that a short name stands for; anything else is returned as it is."""
    known = KNOWN.get(str(source))
    if known is None or Path(source).exists():
        return source
    folder = Path(os.environ.get("SMELT_DATA", ".")) / str(source)
    for name in known.calibration if split == "calibration" else known.evaluation:
        if (folder / name).is_file():
            return folder / name
    return f"{known.hub}@train" if split == "calibration" else f"{known.hub}@test"
