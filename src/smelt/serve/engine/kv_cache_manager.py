"""Manage the KV cache blocks of requests: allocation, prefix reuse and release.

The scheduler deals with requests and tokens; a cache manager maps tokens to blocks. The paged one keeps every token of
all heads and reuses full blocks by their prefix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from smelt.serve.engine.blocks import BlockPool, extend_block_hashes, root_hash
from smelt.serve.engine.request import Request, RequestStatus


class KVCacheManager(ABC):
    """Allocate blocks of one pool to requests."""

    pool: BlockPool
    copies: list[tuple[int, int]]  # blocks to copy before the next step: from, to

    @abstractmethod
    def blocks_needed(self, request: Request, tokens: int) -> int:
        """Return the blocks that a request holds once `tokens` of it are computed."""

    @abstractmethod
    def admit(self, request: Request, reserved: int) -> bool:
        """Start a request with its cached prefix; return False if it does not fit beside `reserved` blocks."""

    @abstractmethod
    def allocate(self, request: Request, tokens: int) -> None:
        """Allocate the blocks for `tokens`; the caller has checked that they are free."""

    @abstractmethod
    def commit(self, request: Request) -> None:
        """Make computed tokens of a request reusable by others."""

    def can_allocate(self, blocks: int) -> bool:
        """Return whether `blocks` can be allocated now."""
        return blocks <= self.pool.num_free_blocks

    def schedulable_tokens(self, request: Request, budget: int, chunk_size: int) -> int:
        """Return how many tokens of a request the next step computes; 0 if a complete chunk exceeds the budget."""
        return min(request.num_expected_tokens - request.num_computed_tokens, budget, chunk_size)

    def release(self, request: Request, reason: str) -> None:
        """Release the blocks of a request; `reason` is its finish reason, empty if it was preempted."""
        self.pool.release(request.blocks)
        request.blocks = []

    def drop_sessions(self) -> None:
        """Release blocks kept only for future requests; a paged cache has none, its cached blocks are free."""
        return

    def max_tokens_for(self, request: Request) -> int:
        """Return the tokens that a request could have if it had the pool to itself."""
        low, high = 0, request.limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.blocks_needed(request, middle) <= self.pool.num_blocks else (low, middle - 1)
            )
        return low

    def max_request_tokens(self, max_model_len: int) -> int:
        """Return the tokens of the longest possible request within `max_model_len`."""
        return min(max_model_len, self.pool.num_blocks * self.pool.block_size)

    def state(self) -> dict[str, int]:
        """Return metrics."""
        return {"blocks": self.pool.num_blocks, "blocks_used": self.pool.num_blocks - self.pool.num_free_blocks}


class PagedCacheManager(KVCacheManager):
    """Manage blocks that hold the same tokens for all layers and heads."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.copies = pool, []

    def blocks_needed(self, request: Request, tokens: int) -> int:
        return self.pool.blocks_for(tokens)

    def admit(self, request: Request, reserved: int) -> bool:
        shared = self._cached_prefix(request)
        needed = self.pool.blocks_for(request.num_expected_tokens) - len(shared) + self.pool.num_free_among(shared)
        if needed + reserved > self.pool.num_free_blocks:
            return False
        self.pool.share(shared)
        request.blocks, request.num_computed_tokens = list(shared), len(shared) * self.pool.block_size
        request.registered = len(shared)
        return True

    def allocate(self, request: Request, tokens: int) -> None:
        request.blocks += self.pool.allocate(self.pool.blocks_for(tokens) - len(request.blocks))

    def commit(self, request: Request) -> None:
        """Add blocks that are full now to the prefix cache."""
        if not self.pool.enable_prefix_caching or request.state is not RequestStatus.RUNNING:
            return
        full = min(request.num_computed_tokens, len(request.tokens)) // self.pool.block_size
        if full > request.registered:
            block_hashes = self._block_hashes(request)
            for index in range(request.registered, full):
                self.pool.cache_block(request.blocks[index], block_hashes[index])
            request.registered = full

    def max_tokens_for(self, request: Request) -> int:
        return min(request.limit, self.pool.num_blocks * self.pool.block_size)

    def release(self, request: Request, reason: str) -> None:
        super().release(request, reason)
        request.registered = 0

    def _cached_prefix(self, request: Request) -> list[int]:
        """Return cached blocks of a request's prefix. Its last token is always computed, for its logits."""
        if request.wants_prompt_logits:
            return []
        max_blocks = (len(request.tokens) - 1) // self.pool.block_size
        blocks = self.pool.find_prefix(self._block_hashes(request)[:max_blocks])
        parent = request.parent
        if parent is not None and parent.state is RequestStatus.RUNNING and len(blocks) < max_blocks:
            blocks = parent.blocks[:max_blocks]
        return blocks

    def _block_hashes(self, request: Request) -> list[bytes]:
        return extend_block_hashes(
            request.tokens, self.pool.block_size, request.block_hashes, root_hash(request.salt, request.adapter)
        )
