"""Training data: token windows and images in memory, and the shuffled order in which ranks read them.

A sample's position depends only on the seed and its number in an endless shuffled stream. The number of samples seen is
therefore all that a checkpoint needs, and a run with another world size continues where the last one stopped.
"""

from __future__ import annotations

from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smelt.data import TextData, load_text
from smelt.data.hub import is_hub
from smelt.data.images import ImageData, load_images
from smelt.data.named_datasets import NAMED_DATASETS, resolve_source
from smelt.errors import DataError, ModelError
from smelt.train.trainer.config import DataConfig

Batch = dict[str, Tensor]
_HELD_OUT_FRACTION = 10  # one in this many samples of a source without a test split
_TOKENIZER_CHUNK = 65_536  # characters
_STATISTICS_IMAGES = 10_000  # images that mean and standard deviation are computed from


class MapDataset(Protocol):
    """Samples that are read by index."""

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> Batch: ...


class ShuffledSampler:
    """An endless stream of sample indices: one permutation of the dataset per epoch."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self._num_samples, self._seed = num_samples, seed
        self._epoch, self._permutation = -1, np.empty(0, dtype=np.int64)

    def indices(self, start: int, count: int) -> np.ndarray:
        """Return the dataset indices of `count` samples of the stream from `start` on: [count] int64."""
        return np.array([self._index(number) for number in range(start, start + count)], dtype=np.int64)

    def _index(self, number: int) -> int:
        epoch, position = divmod(number, self._num_samples)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._epoch, self._permutation = epoch, generator.permutation(self._num_samples)
        return int(self._permutation[position])


def batch_start(samples_seen: int, micro_step: int, batch_size: int, world_size: int, rank: int) -> int:
    """Return the stream position of a rank's batch, `samples_seen` before the step by all ranks together."""
    return samples_seen + (micro_step * world_size + rank) * batch_size


class TokenWindows:
    """Consecutive token sequences of equal length."""

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        self._windows = tokens[: len(tokens) // seq_len * seq_len].reshape(-1, seq_len)  # [windows, seq_len]

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, indices: np.ndarray) -> Batch:
        input_ids = torch.from_numpy(self._windows[indices]).long()  # [batch, seq_len]
        return {"input_ids": input_ids, "labels": input_ids}

    def split(self) -> tuple[TokenWindows, TokenWindows]:
        """Split off the last tenth."""
        count = max(len(self) // _HELD_OUT_FRACTION, 1)
        seq_len = self._windows.shape[1]
        train, held_out = self._windows[:-count], self._windows[-count:]
        return TokenWindows(train.reshape(-1), seq_len), TokenWindows(held_out.reshape(-1), seq_len)


class NormalizedImages:
    """Images in memory as bytes; batches as floats, normalized per channel."""

    def __init__(self, data: ImageData, mean: np.ndarray, std: np.ndarray) -> None:
        self._data = data
        self._mean, self._std = (torch.from_numpy(values).float().view(1, -1, 1, 1) for values in (mean, std))

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, indices: np.ndarray) -> Batch:
        pixels = torch.from_numpy(self._data.pixels[indices]).float() / 255  # [batch, channels, height, width]
        return {
            "pixel_values": (pixels - self._mean) / self._std,
            "labels": torch.from_numpy(self._data.labels[indices]),
        }


def load_token_windows(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> tuple[TokenWindows, TokenWindows]:
    """Load the training and the held-out windows; a source without a test split gives up its last tenth."""
    train = _tokenize_source(data.train, "calibration", data, tokenizer, vocab_size)
    if data.evaluate is not None:
        return train, _tokenize_source(data.evaluate, "evaluation", data, tokenizer, vocab_size)
    if data.train == "default" or data.train in NAMED_DATASETS or is_hub(data.train):
        return train, _tokenize_source(data.train, "evaluation", data, tokenizer, vocab_size)
    if len(train) < 2:
        raise DataError(f"{data.train} has one sequence of {data.seq_len} tokens; add more text, or set data.evaluate.")
    return train.split()


def _tokenize_source(
    source: str, split: str, data: DataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> TokenWindows:
    tokens = _tokenize(load_text(resolve_source(source, split), column=data.column, split=split), tokenizer)
    if len(tokens) < data.seq_len:
        raise DataError(f"{source} has {len(tokens):,} tokens, too few for one sequence of {data.seq_len:,}.")
    if int(tokens.max()) >= vocab_size:
        raise ModelError(
            f"the tokenizer produces token {int(tokens.max()):,} and the model knows {vocab_size:,}; set vocab_size."
        )
    return TokenWindows(tokens, data.seq_len)


def _tokenize(data: TextData, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Tokenize all documents, joined by blank lines: [tokens] int32."""
    text = data.joined
    chunks = [text[start : start + _TOKENIZER_CHUNK] for start in range(0, len(text), _TOKENIZER_CHUNK)]
    encoded = tokenizer(chunks, add_special_tokens=False, verbose=False)["input_ids"]
    return np.fromiter(chain.from_iterable(encoded), dtype=np.int32)


def load_image_splits(data: DataConfig) -> tuple[ImageData, ImageData]:
    """Load the training and the held-out images; a source without a test split gives up its last tenth."""
    train = load_images(data.train, "train")
    assert train is not None
    held_out = load_images(data.evaluate or data.train, "test")
    if held_out is None and data.evaluate is not None:
        held_out = load_images(data.evaluate, "train")
    if held_out is None:
        count = max(len(train) // _HELD_OUT_FRACTION, 1)
        if count == len(train):
            raise DataError(f"{data.train} has one image; at least two are needed.")
        held_out = ImageData(train.name, train.pixels[-count:], train.labels[-count:])
        train = ImageData(train.name, train.pixels[:-count], train.labels[:-count])
    if held_out.pixels.shape[1:] != train.pixels.shape[1:]:
        raise DataError(f"the images of {held_out.name} have another shape than those of {train.name}.")
    return train, held_out


def channel_statistics(data: ImageData) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and standard deviation per channel, from at most about 10,000 images."""
    sample = data.pixels[:: max(len(data) // _STATISTICS_IMAGES, 1)] / np.float64(255)
    return sample.mean(axis=(0, 2, 3)), np.maximum(sample.std(axis=(0, 2, 3)), 1e-3)
