"""Turn samples into log-mel spectrograms, in float; read and write the settings of this front end of a speech model.

The file is untrusted, so that only the settings of a known extractor are read from it, within bounds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BatchFeature, WhisperFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from smelt.errors import ModelError
from smelt.models.image_processor import FILE
from smelt.models.json_file import read_object

WHISPER, LOG_MEL = "WhisperFeatureExtractor", "LogMelFeatureExtractor"
_BOUNDS = {
    "feature_size": (1, 512),
    "sampling_rate": (1_000, 192_000),
    "hop_length": (1, 4_096),
    "n_fft": (2, 8_192),
}
_ALL_BOUNDS = {
    WHISPER: {**_BOUNDS, "chunk_length": (1, 600)},
    LOG_MEL: {**_BOUNDS, "win_length": (2, 8_192)},
}
_SMALLEST_ENERGY = 2.0**-24  # added before the logarithm, as in QuartzNet
_SMALLEST_DEVIATION = 1e-5


@dataclass(frozen=True)
class LogMelFeatureExtractor:
    """Log-mel spectrograms in float, each band normalized over the recording; lengths in samples.

    QuartzNet's pre-emphasis is left out: it adds a constant to each band, which the normalization removes.
    """

    feature_size: int = 64  # mel bands
    sampling_rate: int = 16_000
    hop_length: int = 160
    win_length: int = 320
    n_fft: int = 512
    _filters: Tensor = field(init=False, repr=False, compare=False)  # [bands, frequencies]

    def __post_init__(self) -> None:
        if self.win_length > self.n_fft:
            raise ValueError(f"win_length is {self.win_length}, more than n_fft of {self.n_fft}")
        filters = mel_filter_bank(
            1 + self.n_fft // 2, self.feature_size, 0.0, self.sampling_rate / 2, self.sampling_rate,
            norm="slaney", mel_scale="slaney",
        )  # fmt: skip
        object.__setattr__(self, "_filters", torch.from_numpy(filters.T.astype(np.float32)))

    def __call__(
        self, samples: Sequence[np.ndarray], sampling_rate: int | None = None, return_tensors: str = "pt"
    ) -> BatchFeature:
        """Return `input_features` [recordings, bands, frames], padded with zeros, and their `attention_mask`."""
        if sampling_rate not in (None, self.sampling_rate):
            raise ValueError(f"the samples have a rate of {sampling_rate} Hz, expected {self.sampling_rate}")
        spectrograms = [self._spectrogram(torch.from_numpy(np.asarray(each, np.float32))) for each in samples]
        masks = [torch.ones(len(each), dtype=torch.long) for each in spectrograms]
        features = pad_sequence(spectrograms, batch_first=True).transpose(1, 2).contiguous()
        return BatchFeature({"input_features": features, "attention_mask": pad_sequence(masks, batch_first=True)})

    def _spectrogram(self, samples: Tensor) -> Tensor:
        """Return the normalized log-mel spectrogram [frames, bands]."""
        window = torch.hann_window(self.win_length)
        spectrum = torch.stft(
            samples, self.n_fft, self.hop_length, self.win_length, window, pad_mode="constant", return_complex=True
        )
        bands = (self._filters @ spectrum.abs().square() + _SMALLEST_ENERGY).log()
        deviation = bands.std(-1, correction=0, keepdim=True)
        return ((bands - bands.mean(-1, keepdim=True)) / (deviation + _SMALLEST_DEVIATION)).T


FeatureExtractor: TypeAlias = WhisperFeatureExtractor | LogMelFeatureExtractor


def load_feature_extractor(folder: Path) -> FeatureExtractor | None:
    """Return the feature extractor of a folder; None if it has none."""
    if not (folder / FILE).is_file():
        return None
    values = read_object(folder / FILE)
    name = values.get("feature_extractor_type")
    if not isinstance(name, str) or name not in _ALL_BOUNDS:
        return None
    bounds = _ALL_BOUNDS[name]
    settings: dict[str, Any] = {key: values[key] for key in bounds if key in values}
    for key, value in settings.items():
        low, high = bounds[key]
        if type(value) is not int or not low <= value <= high:
            raise ModelError(f"{folder / FILE}: {key} is {str(value)[:40]}, expected {low} to {high}.")
    if name == WHISPER:
        return WhisperFeatureExtractor(**settings)
    try:
        return LogMelFeatureExtractor(**settings)
    except ValueError as error:
        raise ModelError(f"{folder / FILE}: {error}.") from error


def save_feature_extractor(extractor: FeatureExtractor, folder: Path) -> None:
    """Write the file that `load_feature_extractor` reads."""
    name = LOG_MEL if isinstance(extractor, LogMelFeatureExtractor) else WHISPER
    values = {"feature_extractor_type": name, **{key: getattr(extractor, key) for key in _ALL_BOUNDS[name]}}
    (folder / FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
