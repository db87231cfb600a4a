"""Long texts for a stream: WikiText-2 itself, and texts with a passkey in them."""

from __future__ import annotations

from functools import cache
from typing import Any

from common import shared

from smelt.data import load_text

QUESTION = "\nThe passkey is"
FILLER = (
    "The river runs down to the sea. The stones are grey and the water is cold. A bird sits on the fence. "
    "It looks to the left and to the right. Then the day goes by and the evening comes.\n"
)


def drawn_text(tokenizer: Any, split: str, start: int, count: int) -> list[int]:
    return _tokens(tokenizer, split)[start : start + count]


def with_passkey(tokenizer: Any, haystack: str, length: int, depth: float, number: int) -> list[int]:
    """Return a text of `length` tokens that states the number at this fraction of its length."""
    if haystack == "filler":
        filler = tokenizer(FILLER)["input_ids"]
        hay = (filler * (length // len(filler) + 1))[:length]
    else:
        hay = drawn_text(tokenizer, "test", number, length)
    fact = tokenizer(f"\nThe passkey is {number}. Remember it: the passkey is {number}.\n")["input_ids"]
    position = int(length * depth)
    hay[position : position + len(fact)] = fact
    return hay


@cache
def _tokens(tokenizer: Any, split: str) -> list[int]:
    text = load_text(shared() / f"data/wikitext2/{split}.txt.gz").joined
    if split == "train":
        text = text[: 6 * 250_000]
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids
