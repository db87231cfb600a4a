"""The pool of KV cache blocks: reference counts, and the prefix cache over full blocks.

A free block stays in the prefix cache until it is allocated again; the least recently freed blocks are allocated first.
Block hashes are chained, so a block matches only after the same tokens, with the same salt and adapter.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class BlockPool:
    """A pool of `num_blocks` blocks of `block_size` tokens each."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, block_bytes: int = 0
    ) -> None:
        self.num_blocks, self.block_size, self.enable_prefix_caching = num_blocks, block_size, enable_prefix_caching
        self.block_bytes = block_bytes  # over all layers and heads that share a block, on all devices
        self.references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently freed first
        self._block_hashes: list[bytes | None] = [None] * num_blocks
        self._cached_blocks: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Return how many blocks can be allocated."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold `tokens`."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks and remove them from the prefix cache."""
        if count > self.num_free_blocks:
            raise RuntimeError(f"{count} blocks were requested, {self.num_free_blocks} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._uncache(block)
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

    def find_prefix(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the longest cached prefix as blocks, without references: `share` them."""
        prefix = []
        for block_hash in block_hashes if self.enable_prefix_caching else ():
            block = self._cached_blocks.get(block_hash)
            if block is None:
                break
            prefix.append(block)
        return prefix

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks are free: sharing them takes them from the pool."""
        return sum(self.references[block] == 0 for block in blocks)

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Add a full block to the prefix cache; of two with the same content the first stays."""
        if self.enable_prefix_caching and block_hash not in self._cached_blocks and self._block_hashes[block] is None:
            self._cached_blocks[block_hash], self._block_hashes[block] = block, block_hash

    def _uncache(self, block: int) -> None:
        block_hash = self._block_hashes[block]
        if block_hash is not None:
            del self._cached_blocks[block_hash]
            self._block_hashes[block] = None


def extend_block_hashes(tokens: Sequence[int], block_size: int, block_hashes: list[bytes], root: bytes) -> list[bytes]:
    """Extend the hashes of a text's blocks in place to all blocks that are full now."""
    for block in range(len(block_hashes), len(tokens) // block_size):
        parent = block_hashes[-1] if block_hashes else root
        content = array("q", tokens[block * block_size : (block + 1) * block_size]).tobytes()
        block_hashes.append(hashlib.sha256(parent + content).digest())
    return block_hashes


def root_hash(salt: bytes, adapter: str | None) -> bytes:
    """Return the start of a chain of hashes: what determines the KV cache besides the tokens."""
    return hashlib.sha256(hashlib.sha256(salt).digest() + (adapter or "").encode()).digest()
