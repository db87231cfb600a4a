"""Batches: data turned into the tensors a network takes. The same seed gives the same batches everywhere."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smelt.data.labeled import LabeledData
from smelt.data.text import TextData
from smelt.errors import DataError

Batch = dict[str, Tensor]

# Long text is tokenized piece by piece, and only as many pieces as are needed.
_PIECE_CHARACTERS = 32_768
_PIECES_AT_ONCE = 8
# Windows may overlap when the text is short, but not so far that they say the same thing twice over.
_MOST_USES_OF_A_TOKEN = 2


def text_batches(
    data: TextData, tokenizer: PreTrainedTokenizerBase, *, samples: int, length: int, batch_size: int, seed: int
) -> list[Batch]:
    """`samples` windows of exactly `length` tokens from random places.

    They do not overlap unless the text is too short for that.
    """
    check_positive(samples=samples, length=length, batch_size=batch_size)
    generator = np.random.Generator(np.random.PCG64(seed))
    tokens = _sampled_tokens(data.joined, tokenizer, 2 * samples * length, generator)
    starts = _window_starts(len(tokens), samples, length, generator, data.name)
    windows = torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]))  # [samples, length]
    return [
        {"input_ids": part, "attention_mask": torch.ones_like(part), "labels": part.clone()}
        for part in windows.split(batch_size)
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
    """Items with their labels, each batch padded to its longest. `samples` None takes all of them.

    With `replace` items are drawn independently, so that one may come twice; without `shuffle` the first ones are
    taken in their order.
    """
    check_positive(samples=samples, max_length=max_length, batch_size=batch_size)
    chosen = data.take(_chosen_items(data, samples, seed, replace, shuffle))
    labels = torch.from_numpy(chosen.labels)
    padding = padding_token(tokenizer)
    batches = []
    for start in range(0, len(chosen), batch_size):
        part = slice(start, start + batch_size)
        texts = [chosen.first[part]] if chosen.second is None else [chosen.first[part], chosen.second[part]]
        encoded = tokenizer(*map(list, texts), truncation=True, max_length=max_length, verbose=False)
        batches.append(padded(encoded, padding) | {"labels": labels[part]})
    return batches


def padded(encoded: dict[str, list[list[int]]], padding: int) -> Batch:
    """Rows of different lengths as tensors [rows, longest]: ids end in the padding token, all else in zeros."""
    longest = max(map(len, encoded["input_ids"]))
    return {
        name: torch.tensor([row + [padding if name == "input_ids" else 0] * (longest - len(row)) for row in rows])
        for name, rows in encoded.items()
    }


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token to pad with; a tokenizer that has none lends its end token, which the attention mask then hides."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in candidates if token is not None), 0)


def check_positive(**values: int | None) -> None:
    """Refuses a number below one, by its name; None stands for a number that was not given."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise DataError(f"{name.replace('_', ' ').capitalize()} must be at least 1, not {value}.")


def _sampled_tokens(
    text: str, tokenizer: PreTrainedTokenizerBase, enough: int, generator: np.random.Generator
) -> np.ndarray:
    """The text's tokens in order; of a long text those of randomly chosen pieces, until there are `enough`."""
    pieces = list(_pieces(text))
    order = generator.permutation(len(pieces))
    tokens: dict[int, np.ndarray] = {}
    count = 0
    for start in range(0, len(order), _PIECES_AT_ONCE):
        if count >= enough:
            break
        chosen = order[start : start + _PIECES_AT_ONCE]
        encoded = tokenizer([pieces[index] for index in chosen], add_special_tokens=False, verbose=False)["input_ids"]
        tokens.update((int(index), np.array(row, dtype=np.int64)) for index, row in zip(chosen, encoded, strict=True))
        count += sum(map(len, encoded))
    return np.concatenate([tokens[index] for index in sorted(tokens)])


def _pieces(text: str) -> Iterator[str]:
    """The text cut at line ends (at spaces where a line is too long) into pieces of a bounded size."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        end = start + _PIECE_CHARACTERS
        cut = (text.rfind("\n", start, end) + 1) or text.rfind(" ", start, end)
        end = cut if cut > start else end
        yield text[start:end]
        start = end
    yield text[start:]


def _window_starts(tokens: int, samples: int, length: int, generator: np.random.Generator, name: str) -> np.ndarray:
    """Where the windows begin, in random order. Without overlap: random gaps between windows that lie side by side."""
    places = tokens - length + 1
    if samples > places or samples * length > _MOST_USES_OF_A_TOKEN * tokens:
        raise DataError(
            f"{name} has {tokens:,} tokens, too few for {samples:,} windows of {length:,}: "
            "give more text, or ask for fewer or shorter windows."
        )
    slack = tokens - samples * length
    if slack >= 0:
        starts = np.sort(generator.integers(0, slack + 1, samples)) + length * np.arange(samples)
    else:
        starts = generator.choice(places, samples, replace=False)
    return generator.permutation(starts)


def _chosen_items(data: LabeledData, samples: int | None, seed: int, replace: bool, shuffle: bool) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(seed))
    count = len(data) if samples is None else samples
    if len(data) == 0:
        raise DataError(f"{data.name} is empty: give at least one labeled row.")
    if replace:
        return generator.integers(0, len(data), count)
    if count > len(data):
        raise DataError(f"{data.name} has {len(data):,} rows, too few for {count:,} samples: ask for fewer.")
    return generator.permutation(len(data))[:count] if shuffle else np.arange(count)
