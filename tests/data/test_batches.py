"""Batches: correct tokens and padding, deterministic for a seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smelt.data import Batch, LabeledData, TextData, labeled_batches, text_batches
from smelt.data import batches as batches_module
from smelt.errors import DataError
from tests.character_tokenizer import VOCABULARY, character_tokenizer

# Every position is identified by its text: "0000001\n0000002\n..."
COUNTED = TextData("counted", tuple(f"{number:06d}" for number in range(2000)))
LENGTHS = LabeledData("lengths", tuple("x" * n for n in range(1, 21)), None, np.arange(20), False)


def windows(data: TextData, **options: int) -> torch.Tensor:
    parts = text_batches(data, character_tokenizer(), **({"batch_size": 4, "seed": 0} | options))
    for part in parts:
        assert part["input_ids"].dtype == torch.int64
        assert torch.equal(part["labels"], part["input_ids"]) and bool((part["attention_mask"] == 1).all())
    return torch.cat([part["input_ids"] for part in parts])


def window_starts(sampled: torch.Tensor, text: str) -> list[int]:
    characters = {number: token for token, number in VOCABULARY.items()}
    results = [text.find("".join(characters[int(token)] for token in window)) for window in sampled]
    assert min(results) >= 0, "a window is not a passage of the text"
    return sorted(results)


def test_windows_do_not_overlap() -> None:
    sampled = windows(COUNTED, samples=100, length=128)
    assert sampled.shape == (100, 128)
    starts = window_starts(sampled, COUNTED.joined)
    assert min(np.diff(starts)) >= 128
    assert starts[0] < 2000 and starts[-1] > 12_000


@pytest.mark.parametrize("chunk", [100, 10_000])
def test_windows_fill_the_text_to_the_last_token(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(batches_module, "_CHUNK_CHARACTERS", chunk)
    text = TextData("exact", (COUNTED.joined[:1280],))
    assert window_starts(windows(text, samples=10, length=128), text.joined) == list(range(0, 1280, 128))


def test_windows_of_short_text_overlap_as_little_as_possible() -> None:
    text = TextData("short", (COUNTED.joined[:1000],))
    starts = window_starts(windows(text, samples=15, length=128), text.joined)
    assert len(set(starts)) == 15
    with pytest.raises(DataError, match=r"short has 1,000 tokens, too few for 16 windows of 128: give more text"):
        windows(text, samples=16, length=128)
    with pytest.raises(DataError, match="too few for 1 windows of 1,001"):
        windows(text, samples=1, length=1001)
    with pytest.raises(DataError, match="too few for 2 windows of 1,000"):
        windows(text, samples=2, length=1000)


def test_windows_contain_only_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "_CHUNK_CHARACTERS", 100)
    tokenizer = character_tokenizer(encoder=True)
    (part,) = text_batches(COUNTED, tokenizer, samples=40, length=300, batch_size=40, seed=0)
    assert not {VOCABULARY["[CLS]"], VOCABULARY["[SEP]"]} & set(part["input_ids"].unique().tolist())


def test_the_seed_determines_the_windows() -> None:
    first, repeated, other = (windows(COUNTED, samples=20, length=50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, repeated) and not torch.equal(first, other)


def test_long_text_is_tokenized_only_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "_CHUNK_CHARACTERS", 500)
    tokenizer, seen = character_tokenizer(), []
    real = type(tokenizer).__call__

    def counting(self: object, texts: list[str], **options: object) -> object:
        seen.extend(texts)
        return real(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counting)
    text_batches(COUNTED, tokenizer, samples=10, length=100, batch_size=10, seed=0)
    assert 2000 <= sum(map(len, seen)) < 6500
    assert all(text in COUNTED.joined for text in seen)


@pytest.mark.parametrize("text", ["a b\n" * 999, "word " * 999, "x" * 5000, "", "\n" * 2000])
def test_chunks_lose_nothing(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(batches_module, "_CHUNK_CHARACTERS", 64)
    chunks = list(batches_module._split_chunks(text))
    assert "".join(chunks) == text and max(map(len, chunks)) <= 64


def labeled(data: LabeledData = LENGTHS, **options: object) -> list[Batch]:
    defaults: dict[str, object] = {"samples": None, "max_length": 32, "batch_size": 8, "seed": 0}
    return labeled_batches(data, character_tokenizer(encoder=True), **(defaults | options))  # type: ignore[arg-type]


def test_batches_are_padded_to_their_longest_row() -> None:
    parts = labeled(shuffle=False)
    assert [tuple(part["input_ids"].shape) for part in parts] == [(8, 10), (8, 18), (4, 22)]
    assert parts[0].keys() == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    for part in parts:
        # [CLS] and [SEP] surround label - 1 characters.
        assert part["attention_mask"].sum(dim=1).tolist() == (part["labels"] + 3).tolist()
        assert bool((part["input_ids"][part["attention_mask"] == 0] == VOCABULARY["[PAD]"]).all())


def test_pairs_are_truncated_and_have_token_types() -> None:
    pairs = LabeledData("pairs", ("aaaa", "b"), ("cc", "d" * 50), np.array([0.5, 1.0], dtype=np.float32), True)
    (part,) = labeled(pairs, max_length=20, shuffle=False)
    assert part["input_ids"].shape == (2, 20) and part["labels"].dtype == torch.float32
    assert part["token_type_ids"][0].tolist() == [0] * 6 + [1] * 3 + [0] * 11


def test_a_tokenizer_without_padding_uses_eos() -> None:
    tokenizer = character_tokenizer(padding=False)
    (part,) = labeled_batches(
        LENGTHS.take([0, 2]), tokenizer, samples=2, max_length=9, batch_size=2, seed=0, shuffle=False
    )
    assert part["input_ids"][0].tolist() == [VOCABULARY["x"], VOCABULARY["[SEP]"], VOCABULARY["[SEP]"]]
    assert part["attention_mask"][0].tolist() == [1, 0, 0]
    assert tokenizer.pad_token is None


def test_sampling() -> None:
    def sampled_rows(**options: object) -> list[int]:
        return [int(label) for part in labeled(**options) for label in part["labels"]]

    assert sampled_rows(shuffle=False, samples=5) == [0, 1, 2, 3, 4]
    assert sorted(sampled_rows()) == list(range(20)) and sampled_rows() != list(range(20))
    assert sampled_rows(seed=3) == sampled_rows(seed=3) != sampled_rows(seed=4)
    assert len(set(sampled_rows(samples=15))) == 15
    assert len(sampled_rows(samples=200, replace=True)) == 200
    assert len(set(sampled_rows(samples=20, replace=True))) < 20


def test_invalid_sampling() -> None:
    with pytest.raises(DataError, match="20 rows, too few for 21 samples"):
        labeled(samples=21)
    with pytest.raises(DataError, match="lengths is empty"):
        labeled(LENGTHS.take([]))
    with pytest.raises(DataError, match="Batch size must be at least 1, not 0"):
        labeled(batch_size=0)
