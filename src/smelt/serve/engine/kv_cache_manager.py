"""What requests hold of the pool: how many blocks, what they find there, and what they leave for others.

The scheduler knows requests and tokens; how tokens become blocks is the memory's business. In the plain one every token
is kept, all heads side by side, and full blocks are found again by the text before them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from smelt.serve.engine.blocks import BlockPool, chained, root_digest
from smelt.serve.engine.request import Request, RequestStatus


class KVCacheManager(ABC):
    """Blocks of one pool for requests that wait, run and end."""

    pool: BlockPool
    copies: list[tuple[int, int]]  # blocks to copy before the next step: from, to

    @abstractmethod
    def blocks_needed(self, request: Request, tokens: int) -> int:
        """Blocks that a request holds once so many of its tokens are computed."""

    @abstractmethod
    def admit(self, request: Request, reserved: int) -> bool:
        """Begin a request with what is there of it already. False: it does not fit beside what was reserved."""

    @abstractmethod
    def allocate(self, request: Request, tokens: int) -> None:
        """Take the blocks for so many tokens; they are there."""

    @abstractmethod
    def commit(self, request: Request) -> None:
        """Tokens of it were computed: what others can use of them is known from now on."""

    def can_allocate(self, blocks: int) -> bool:
        """Whether so many blocks can be taken now."""
        return blocks <= self.pool.free

    def schedulable_tokens(self, request: Request, budget: int, chunk_size: int) -> int:
        """How many tokens of a request the next step computes; 0 where there is no room for what must be whole."""
        return min(request.num_expected_tokens - request.num_computed_tokens, budget, chunk_size)

    def release(self, request: Request, reason: str) -> None:
        """Give its blocks back; `reason` is that of its end, empty when it was preempted."""
        self.pool.release(request.blocks)
        request.blocks = []

    def drop_sessions(self) -> None:
        """Give back what is only carried for requests to come; blocks of a plain cache are free as they are."""
        return

    def max_tokens_of(self, request: Request) -> int:
        """Tokens that the request could have with the whole pool."""
        low, high = 0, request.limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_needed(request, middle) <= self.pool.blocks else (low, middle - 1)
        return low

    def max_request_tokens(self, max_model_len: int) -> int:
        """Tokens of the longest text that a request could have, where a context has so many."""
        return min(max_model_len, self.pool.blocks * self.pool.size)

    def state(self) -> dict[str, int]:
        """Numbers for an operator."""
        return {"blocks": self.pool.blocks, "blocks_used": self.pool.blocks - self.pool.free}


class PagedCacheManager(KVCacheManager):
    """A block holds the same tokens for all layers and heads."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.copies = pool, []

    def blocks_needed(self, request: Request, tokens: int) -> int:
        return self.pool.blocks_for(tokens)

    def admit(self, request: Request, reserved: int) -> bool:
        found = self._shared(request)
        wanted = self.pool.blocks_for(request.num_expected_tokens) - len(found) + self.pool.free_among(found)
        if wanted + reserved > self.pool.free:
            return False
        self.pool.share(found)
        request.blocks, request.num_computed_tokens = list(found), len(found) * self.pool.size
        request.registered = len(found)
        return True

    def allocate(self, request: Request, tokens: int) -> None:
        request.blocks += self.pool.take(self.pool.blocks_for(tokens) - len(request.blocks))

    def commit(self, request: Request) -> None:
        """Blocks that are full now can be found by others."""
        if not self.pool.prefix_cache or request.state is not RequestStatus.RUNNING:
            return
        full = min(request.num_computed_tokens, len(request.tokens)) // self.pool.size
        if full > request.registered:
            digests = self._chain(request)
            for place in range(request.registered, full):
                self.pool.register(request.blocks[place], digests[place])
            request.registered = full

    def max_tokens_of(self, request: Request) -> int:
        return min(request.limit, self.pool.blocks * self.pool.size)

    def release(self, request: Request, reason: str) -> None:
        super().release(request, reason)
        request.registered = 0

    def _shared(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of the request already. Its last token is always computed: it gives logits."""
        whole = (len(request.tokens) - 1) // self.pool.size
        found = self.pool.find(self._chain(request)[:whole])
        parent = request.parent
        if parent is not None and parent.state is RequestStatus.RUNNING and len(found) < whole:
            found = parent.blocks[:whole]
        return found

    def _chain(self, request: Request) -> list[bytes]:
        return chained(request.tokens, self.pool.size, request.digests, root_digest(request.salt, request.adapter))
