"""Reusable prefixes of compressed KV caches: what the next turn of a conversation begins with.

A text is identified by a digest of its tokens, under its salt and adapter. Its blocks stay allocated until memory is
needed for something else; the least recently used go first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Session(Protocol):
    """The KV cache that a finished request left behind."""

    @property
    def tokens(self) -> int:
        """Length of the text by which it is best."""


SessionT = TypeVar("SessionT", bound=Session)


class SessionCache(Generic[SessionT]):
    """Sessions by digest, least recently used first."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, SessionT] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, root: bytes, tokens: Sequence[int]) -> SessionT | None:
        """Return the session of the longest prefix that leaves at least one token to compute."""
        lengths = sorted(length for length in self._lengths if length < len(tokens))
        best = None
        for digest in _digests(root, tokens, lengths):
            if digest in self._sessions:
                best = digest
        if best is None:
            return None
        self._sessions.move_to_end(best)
        return self._sessions[best]

    def add(self, root: bytes, tokens: Sequence[int], session: SessionT) -> bool:
        """Add the session of a text; return False if there is one already."""
        digest = _digests(root, tokens, [session.tokens])[0]
        if digest in self._sessions:
            self._sessions.move_to_end(digest)
            return False
        self._sessions[digest] = session
        self._lengths[session.tokens] += 1
        return True

    def drop(self) -> SessionT:
        """Remove and return the least recently used session."""
        _, session = self._sessions.popitem(last=False)
        self._lengths[session.tokens] -= 1
        if not self._lengths[session.tokens]:
            del self._lengths[session.tokens]
        return session


def _digests(root: bytes, tokens: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
    """Return the digests of the prefixes of these lengths, in ascending order."""
    running, hashed, digests = hashlib.sha256(root), 0, []
    for length in lengths:
        running.update(array("q", tokens[hashed:length]).tobytes())
        hashed = length
        digests.append(running.copy().digest())
    return digests
