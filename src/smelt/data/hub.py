"""Read a data set from the Hugging Face hub through the optional `datasets` package.

No code of a repository is ever run. A source is `hub:owner/name`, optionally with a configuration and a split:
`hub:owner/name:configuration@split`. Without a split, calibration uses `train`; evaluation uses `validation`, else
`test`, else `train`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from smelt.data.files import TABLE_SUFFIXES, TEXT_SUFFIXES, Row, suffix_of
from smelt.data.limits import ROW_BYTES, VALUE_BYTES, DecodedBytes
from smelt.errors import DataError, install_command

_IDENTIFIER = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<configuration>[\w.-]+))?(@(?P<split>[\w.-]+))?")
_PREFIX = "hub:"
_SPLITS = {"calibration": ("train",), "evaluation": ("validation", "test", "train")}


def is_hub(source: str) -> bool:
    """Return whether a source is on the hub: it has the prefix, or is `owner/name` and not an existing file."""
    if source.startswith(_PREFIX):
        return True
    looks_like_file = suffix_of(Path(source)) in TEXT_SUFFIXES + TABLE_SUFFIXES or Path(source).exists()
    return not looks_like_file and source.count("/") == 1 and _IDENTIFIER.fullmatch(source) is not None


def read_hub(source: str, purpose: str) -> list[Row]:
    """Read the rows of one split."""
    match = _IDENTIFIER.fullmatch(source.removeprefix(_PREFIX))
    if match is None:
        raise DataError(f"'{source}' is not a data set on the hub: expected hub:owner/name:configuration@split.")
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"'{source}' is not a local file, and reading it from the hub needs one more package: "
            f"{install_command('datasets')}."
        ) from error
    name, configuration = match["name"], match["configuration"]
    try:
        split = match["split"] or _split_for(datasets.get_dataset_split_names(name, configuration), purpose, source)
        dataset = datasets.load_dataset(name, configuration, split=split)
        per_row = ROW_BYTES + VALUE_BYTES * len(dataset.column_names)
        DecodedBytes(source).add(dataset.data.nbytes + dataset.num_rows * per_row)
        rows: list[Row] = dataset.to_list()
    except DataError:
        raise
    except Exception as error:  # the package raises its own, network and file system errors
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"'{source}' cannot be read from the hub ({reason}): check the name and the network."
        ) from error
    return rows


def _split_for(available: list[Any], purpose: str, source: str) -> str:
    for split in _SPLITS[purpose]:
        if split in available:
            return split
    raise DataError(f"'{source}' has no split for {purpose}: add one of @{', @'.join(map(str, available))}.")
