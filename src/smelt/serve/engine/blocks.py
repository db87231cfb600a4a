"""The pool of cache blocks: reference counts, and the prefix cache over blocks that are full.

A block that nobody holds stays known by its digest until it is handed out again; blocks that became free longest ago
are handed out first. Digests are a chain, so that a block is found only behind the same tokens, the same salt and the
same adapter.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """`blocks` blocks of `size` tokens each."""

    def __init__(self, blocks: int, size: int, *, prefix_cache: bool = True) -> None:
        self.blocks, self.size, self.prefix_cache = blocks, size, prefix_cache
        self.references = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # longest free first
        self._digests: list[bytes | None] = [None] * blocks
        self._known: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """So many fresh blocks; what the prefix cache knew them by is forgotten."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks were asked for, {self.free} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self.references[block] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back, the last one first: the beginning of a text is more often wanted again than its end."""
        for block in reversed(blocks):
            if self.references[block] <= 0:
                raise RuntimeError(f"block {block} was given back twice")
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free[block] = None

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of these blocks."""
        for block in blocks:
            if self.references[block] == 0:
                del self._free[block]
            self.references[block] += 1

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The longest run of known blocks from the beginning. They are not held yet: `share` them."""
        found = []
        for digest in digests if self.prefix_cache else ():
            block = self._known.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def free_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody holds: sharing them makes the pool smaller."""
        return sum(self.references[block] == 0 for block in blocks)

    def register(self, block: int, digest: bytes) -> None:
        """A block is full and can be found. Of two with the same content the first one stays the known one."""
        if self.prefix_cache and digest not in self._known and self._digests[block] is None:
            self._known[digest], self._digests[block] = block, digest

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._known[digest]
            self._digests[block] = None


def chained(tokens: Sequence[int], size: int, digests: list[bytes], root: bytes) -> list[bytes]:
    """Extend the digests of a text's full blocks, in place, to all that are full now."""
    for block in range(len(digests), len(tokens) // size):
        parent = digests[-1] if digests else root
        content = array("q", tokens[block * size : (block + 1) * size]).tobytes()
        digests.append(hashlib.sha256(parent + content).digest())
    return digests


def root_digest(salt: bytes, adapter: str | None) -> bytes:
    """Where a chain begins: what besides the tokens decides about keys and values."""
    return hashlib.sha256(hashlib.sha256(salt).digest() + (adapter or "").encode()).digest()
