"""The pool of KV cache blocks: reference counts, and the prefix cache over full blocks.

A free block stays in the prefix cache until it is allocated again; the least recently freed blocks are allocated first.
Digests are extend_digests, so a block matches only after the same tokens, with the same salt and adapter.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """A pool of `blocks` blocks of `size` tokens each."""

    def __init__(self, blocks: int, size: int, *, prefix_cache: bool = True) -> None:
        self.blocks, self.size, self.prefix_cache = blocks, size, prefix_cache
        self.references = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))  # least recently freed first
        self._digests: list[bytes | None] = [None] * blocks
        self._cached_blocks: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Return how many blocks can be allocated."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens`."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Allocate `count` blocks and remove them from the prefix cache."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks were requested, {self.free} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self.references[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block, the last one first: the beginning of a text is more likely to be reused."""
        for block in reversed(blocks):
            if self.references[block] <= 0:
                raise RuntimeError(f"block {block} was released twice")
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free[block] = None

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these blocks."""
        for block in blocks:
            if self.references[block] == 0:
                del self._free[block]
            self.references[block] += 1

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the longest cached prefix as blocks, without references: `share` them."""
        prefix = []
        for digest in digests if self.prefix_cache else ():
            block = self._cached_blocks.get(digest)
            if block is None:
                break
            prefix.append(block)
        return prefix

    def free_among(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks are free: sharing them takes them from the pool."""
        return sum(self.references[block] == 0 for block in blocks)

    def register(self, block: int, digest: bytes) -> None:
        """Add a full block to the prefix cache; of two with the same content the first stays."""
        if self.prefix_cache and digest not in self._cached_blocks and self._digests[block] is None:
            self._cached_blocks[digest], self._digests[block] = block, digest

    def _forget(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._cached_blocks[digest]
            self._digests[block] = None


def extend_digests(tokens: Sequence[int], size: int, digests: list[bytes], root: bytes) -> list[bytes]:
    """Extend a text's block digests in place to all blocks that are full now."""
    for block in range(len(digests), len(tokens) // size):
        parent = digests[-1] if digests else root
        content = array("q", tokens[block * size : (block + 1) * size]).tobytes()
        digests.append(hashlib.sha256(parent + content).digest())
    return digests


def root_digest(salt: bytes, adapter: str | None) -> bytes:
    """Return the start of a digest chain: what determines the KV cache besides the tokens."""
    return hashlib.sha256(hashlib.sha256(salt).digest() + (adapter or "").encode()).digest()
