"""Convert data to batches of input tensors, deterministically for a given seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smelt.data.image_files import LabeledImages
from smelt.data.labeled import LabeledData
from smelt.data.text import TextData
from smelt.errors import DataError

Batch = dict[str, Tensor]

# Long text is tokenized in chunks, and only as many as needed.
_CHUNK_CHARACTERS = 32_768
_CHUNKS_PER_CALL = 8
# Windows may overlap if the text is short, but only up to this average number of uses per token.
_MAX_USES_PER_TOKEN = 2


def text_batches(
    data: TextData, tokenizer: PreTrainedTokenizerBase, *, samples: int, length: int, batch_size: int, seed: int
) -> list[Batch]:
    """Sample `samples` windows of exactly `length` tokens at random positions.

    They do not overlap unless the text is too short.
    """
    check_positive(samples=samples, length=length, batch_size=batch_size)
    generator = np.random.Generator(np.random.PCG64(seed))
    tokens = _sample_tokens(data.joined, tokenizer, 2 * samples * length, generator)
    starts = _window_starts(len(tokens), samples, length, generator, data.name)
    windows = torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]))  # [samples, length]
    if windows.numel() > 1 and bool((windows == windows[0, 0]).all()):
        raise DataError(f"{data.name} repeats one token, which says nothing about a model: give ordinary text.")
    return [
        {"input_ids": window_batch, "attention_mask": torch.ones_like(window_batch), "labels": window_batch.clone()}
        for window_batch in windows.split(batch_size)
    ]


def labeled_batches(
    data: LabeledData,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int | None,
    max_length: int,
    batch_size: int,
    seed: int,
    replace: bool = False,
    shuffle: bool = True,
) -> list[Batch]:
    """Batch items with their labels, padding each batch to its longest row. `samples` None takes all items.

    With `replace` items are sampled with replacement; without `shuffle` the first items are taken in order.
    """
    check_positive(samples=samples, max_length=max_length, batch_size=batch_size)
    selected = data.take(_sample_indices(data, samples, seed, replace, shuffle))
    labels = torch.from_numpy(selected.labels)
    padding = padding_token_id(tokenizer)
    batches = []
    for start in range(0, len(selected), batch_size):
        part = slice(start, start + batch_size)
        texts = [selected.first[part]] if selected.second is None else [selected.first[part], selected.second[part]]
        encoded = tokenizer(*map(list, texts), truncation=True, max_length=max_length, verbose=False)
        batches.append(pad_batch(encoded, padding) | {"labels": labels[part]})
    return batches


def image_batches(
    data: LabeledImages, prepare: Callable[[Sequence[Any]], Tensor], *, samples: int | None, batch_size: int, seed: int
) -> Iterator[Batch]:
    """Decode and prepare images batch by batch. `samples` None takes all of them, in order.

    `prepare` converts PIL images to pixel values [images, channels, height, width].
    """
    check_positive(samples=samples, batch_size=batch_size)
    order = _sample_indices(data, samples, seed, False, samples is not None)
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        pixels = prepare([data.decode(int(index)) for index in part])
        labels = {} if data.labels is None else {"labels": torch.from_numpy(data.labels[part])}
        yield {"pixel_values": pixels, **labels}


def pad_batch(encoded: dict[str, list[list[int]]], padding: int) -> Batch:
    """Pad rows to tensors [rows, longest]: ids with the padding token, everything else with zeros."""
    longest = max(1, *map(len, encoded["input_ids"]))  # 1: texts may be empty
    return {
        name: torch.tensor([row + [padding if name == "input_ids" else 0] * (longest - len(row)) for row in rows])
        for name, rows in encoded.items()
    }


def padding_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token, else the end token (which the attention mask hides), else 0."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in candidates if token is not None), 0)


def check_positive(**values: int | None) -> None:
    """Raise for a value below 1, naming it; None is not checked."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise DataError(f"{name.replace('_', ' ').capitalize()} must be at least 1, not {value}.")


def _sample_tokens(
    text: str, tokenizer: PreTrainedTokenizerBase, min_tokens: int, generator: np.random.Generator
) -> np.ndarray:
    """Tokenize the text, or random chunks of a long text until there are `min_tokens` tokens, in text order."""
    texts = list(_split_chunks(text))
    order = generator.permutation(len(texts))
    tokens: dict[int, np.ndarray] = {}
    count = 0
    for start in range(0, len(order), _CHUNKS_PER_CALL):
        if count >= min_tokens:
            break
        indices = order[start : start + _CHUNKS_PER_CALL]
        encoded = tokenizer([texts[index] for index in indices], add_special_tokens=False, verbose=False)["input_ids"]
        tokens.update((int(index), np.array(row, dtype=np.int64)) for index, row in zip(indices, encoded, strict=True))
        count += sum(map(len, encoded))
    return np.concatenate([tokens[index] for index in sorted(tokens)])


def _split_chunks(text: str) -> Iterator[str]:
    """Yield chunks of bounded size, split at line ends (or at spaces if a line is too long)."""
    start = 0
    while len(text) - start > _CHUNK_CHARACTERS:
        end = start + _CHUNK_CHARACTERS
        cut = (text.rfind("\n", start, end) + 1) or text.rfind(" ", start, end)
        end = cut if cut > start else end
        yield text[start:end]
        start = end
    yield text[start:]


def _window_starts(tokens: int, samples: int, length: int, generator: np.random.Generator, name: str) -> np.ndarray:
    """Return the window starts in random order: random gaps between non-overlapping windows if the text suffices."""
    num_starts = tokens - length + 1
    if samples > num_starts or samples * length > _MAX_USES_PER_TOKEN * tokens:
        raise DataError(
            f"{name} has {tokens:,} tokens, too few for {samples:,} windows of {length:,}: "
            "give more text, or use fewer or shorter windows."
        )
    slack = tokens - samples * length
    if slack >= 0:
        starts = np.sort(generator.integers(0, slack + 1, samples)) + length * np.arange(samples)
    else:
        starts = generator.choice(num_starts, samples, replace=False)
    return generator.permutation(starts)


def _sample_indices(
    data: LabeledData | LabeledImages, samples: int | None, seed: int, replace: bool, shuffle: bool
) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(seed))
    count = len(data) if samples is None else samples
    if len(data) == 0:
        raise DataError(f"{data.name} is empty: give at least one labeled row.")
    if replace:
        return generator.integers(0, len(data), count)
    if count > len(data):
        raise DataError(f"{data.name} has {len(data):,} rows, too few for {count:,} samples: use fewer.")
    return generator.permutation(len(data))[:count] if shuffle else np.arange(count)
