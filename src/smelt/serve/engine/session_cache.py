"""Compressed texts that a later request may go on from: what a conversation's next turn begins with.

A text is known by a digest of its tokens, under its salt and adapter. Its pages are held until memory is wanted for
something else; the ones that were used longest ago go first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from smelt.kvcache.eviction.policy import ClusterCounts


@dataclass(frozen=True)
class Carried:
    """The first `tokens` of a text, as its clusters kept them."""

    tokens: int
    lengths: ClusterCounts  # of each cluster
    pages: dict[int, int]  # place in the table -> page


class Left(Protocol):
    """What is left of a text."""

    @property
    def tokens(self) -> int:
        """Those of the text by which it is found."""


Text = TypeVar("Text", bound=Left)


class CarriedTexts(Generic[Text]):
    """By digest, in the order of their last use."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Text] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, root: bytes, tokens: Sequence[int]) -> Text | None:
        """The longest known beginning of a text that leaves at least one token to compute."""
        wanted = sorted(length for length in self._lengths if length < len(tokens))
        found = None
        for digest in _digests(root, tokens, wanted):
            if digest in self._known:
                found = digest
        if found is None:
            return None
        self._known.move_to_end(found)
        return self._known[found]

    def add(self, root: bytes, tokens: Sequence[int], carried: Text) -> bool:
        """False: the same text is known already."""
        digest = _digests(root, tokens, [carried.tokens])[0]
        if digest in self._known:
            self._known.move_to_end(digest)
            return False
        self._known[digest] = carried
        self._lengths[carried.tokens] += 1
        return True

    def drop(self) -> Text:
        """Forget the one that was used longest ago."""
        _, carried = self._known.popitem(last=False)
        self._lengths[carried.tokens] -= 1
        if not self._lengths[carried.tokens]:
            del self._lengths[carried.tokens]
        return carried


def _digests(root: bytes, tokens: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """Of the beginnings of these lengths, which are in order."""
    running, at, found = hashlib.sha256(root), 0, []
    for length in lengths:
        running.update(array("q", tokens[at:length]).tobytes())
        at = length
        found.append(running.copy().digest())
    return found
