"""Find evaluation data that also occurs in calibration data, where a measurement would be too good."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from smelt.data.demonstrations import Demonstrations
from smelt.data.environments import Environment
from smelt.data.image_files import LabeledImages
from smelt.data.labeled import LabeledData
from smelt.data.multiple_choice import MultipleChoiceData
from smelt.data.prompts import PromptData
from smelt.data.speech import SpeechData
from smelt.data.text import TextData

NGRAM = 13  # words, as in the contamination study of GPT-3 (Brown et al., 2020)
_MAX_CHARACTERS = 10**8  # of each data set; the rest is not looked at
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, from the golden ratio

Data = (
    TextData | LabeledData | MultipleChoiceData | LabeledImages | SpeechData | PromptData | Demonstrations | Environment
)


def overlap(evaluation: Data, calibration: Data) -> float:
    """Return the fraction of the evaluation data's n-grams of 13 words that also occur in the calibration data.

    Upper and lower case are the same. A document of fewer words is one n-gram. Of images and
    recordings, the fraction that is the same to the byte.
    """
    encoded = (LabeledImages, SpeechData)
    if isinstance(evaluation, encoded) and isinstance(calibration, encoded):
        known = {hash(calibration.content(index)) for index in range(len(calibration))}
        return sum(hash(evaluation.content(index)) in known for index in range(len(evaluation))) / len(evaluation)
    wanted = _ngrams(evaluation)
    return float(np.isin(wanted, _ngrams(calibration)).mean()) if len(wanted) else 0.0


def _ngrams(data: Data) -> np.ndarray:
    """Return a hash of each n-gram, uint64."""
    hashes, characters = [], 0
    for document in _documents(data):
        words = document[: _MAX_CHARACTERS - characters].casefold().split()
        if words:
            hashes.append(_document_ngrams(np.fromiter(map(hash, words), np.int64, len(words)).view(np.uint64)))
        characters += len(document)
        if characters >= _MAX_CHARACTERS:
            break
    return np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)


def _document_ngrams(words: np.ndarray) -> np.ndarray:
    """Return a polynomial hash of each run of n words, modulo 2**64."""
    length = min(NGRAM, len(words))
    hashes = np.zeros(len(words) - length + 1, np.uint64)
    for offset in range(length):
        hashes = hashes * _MULTIPLIER + words[offset : offset + len(hashes)]
    return hashes


def _documents(data: Data) -> Iterator[str]:
    if isinstance(data, TextData):
        yield from data.documents
    elif isinstance(data, LabeledData):
        yield from data.first if data.second is None else map(" ".join, zip(data.first, data.second, strict=True))
    elif isinstance(data, PromptData):
        for messages in data.conversations:
            yield from (message["content"] for message in messages)
    elif isinstance(data, MultipleChoiceData):
        for item in data.items:
            yield f"{item.contexts[item.gold]} {item.continuations[item.gold]}"
