"""Read and write the feature extractor of a speech model: what turns samples into log-mel spectrograms.

The file is untrusted, so that only the settings of Whisper's extractor are read from it, within bounds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import WhisperFeatureExtractor

from smelt.errors import ModelError
from smelt.models.image_processor import FILE
from smelt.models.json_file import read_object

TYPE = "WhisperFeatureExtractor"
_BOUNDS = {
    "feature_size": (1, 512),
    "sampling_rate": (1_000, 192_000),
    "hop_length": (1, 4_096),
    "chunk_length": (1, 600),
    "n_fft": (2, 8_192),
}


def load_feature_extractor(folder: Path) -> WhisperFeatureExtractor | None:
    """Return the feature extractor of a folder; None if it has none."""
    if not (folder / FILE).is_file():
        return None
    values = read_object(folder / FILE)
    if values.get("feature_extractor_type") != TYPE:
        return None
    settings: dict[str, Any] = {key: values[key] for key in _BOUNDS if key in values}
    for key, value in settings.items():
        low, high = _BOUNDS[key]
        if type(value) is not int or not low <= value <= high:
            raise ModelError(f"{folder / FILE}: {key} is {str(value)[:40]}, expected {low} to {high}.")
    return WhisperFeatureExtractor(**settings)


def save_feature_extractor(extractor: WhisperFeatureExtractor, folder: Path) -> None:
    """Write the file that `load_feature_extractor` reads."""
    values = {"feature_extractor_type": TYPE, **{key: getattr(extractor, key) for key in _BOUNDS}}
    (folder / FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
