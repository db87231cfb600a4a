"""Blocks of requests whose KV cache is bounded: never more than those of the token cap, however long the text is.

When a cache is compressed, and so what it holds, depends on the text alone. The cache of a finished request stays
reusable: a request that continues its text begins with a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smelt.kvcache.streaming.config import BoundedCacheSize
from smelt.kvcache.streaming.novelty import NoveltyTracker
from smelt.serve.engine.blocks import BlockPool, root_hash
from smelt.serve.engine.kv_cache_manager import KVCacheManager
from smelt.serve.engine.request import CacheState, Request
from smelt.serve.engine.session_cache import SessionCache


@dataclass(eq=False)
class BoundedCacheState(CacheState):
    """Novelty of the cached tokens, and `next_novelty` [1] of the next token: infinite before the first."""

    novelty: NoveltyTracker
    next_novelty: Tensor
    source: list[int] = field(default_factory=list)  # blocks of a finished request, to copy before anything is read

    @classmethod
    def empty(cls, cap: int, device: torch.device) -> BoundedCacheState:
        return cls(NoveltyTracker(cap, device), torch.full((1,), torch.inf, device=device))

    def trimmed(self) -> BoundedCacheState:
        """Return a copy no larger than what is cached."""
        return BoundedCacheState(self.novelty.copy(self.novelty.length), self.next_novelty)

    def resumed(self, cap: int, source: list[int]) -> BoundedCacheState:
        """Return a copy for a request that continues this text, with space for `cap` tokens."""
        return BoundedCacheState(self.novelty.copy(cap), self.next_novelty, list(source))

    def append(self, first: int, following_novelty: Tensor) -> None:
        """Record tokens from text position `first` on; `following_novelty` [tokens] is that of each one's successor."""
        self.novelty.add(first, torch.cat((self.next_novelty, following_novelty[:-1])))
        self.next_novelty = following_novelty[-1:]


@dataclass(frozen=True)
class BoundedSession:
    """The cache of a finished text without its last token, whose novelty alone is known."""

    tokens: int  # of the text
    blocks: list[int]
    state: BoundedCacheState


class BoundedCacheManager(KVCacheManager):
    """`empty` makes the state of a new request."""

    def __init__(
        self, pool: BlockPool, size: BoundedCacheSize, empty: Callable[[], BoundedCacheState], *, reuse: bool = True
    ) -> None:
        self.pool, self.size, self.reuse = pool, size, reuse
        self.sessions: SessionCache[BoundedSession] = SessionCache()
        self.copies = []
        self._empty = empty
        self._session_blocks = 0  # held only by finished sessions

    def blocks_needed(self, request: Request, tokens: int) -> int:
        """Return all blocks of the cap, with the catalyst prompt, from the first compression on."""
        return self.pool.blocks_for(tokens if tokens <= self.size.max_text_tokens else self.size.capacity)

    def admit(self, request: Request, reserved: int) -> bool:
        session = self._find(request)
        if not self.can_allocate(self.blocks_needed(request, request.num_expected_tokens) + reserved):
            return False
        request.cache_state = (
            self._empty() if session is None else session.state.resumed(self.size.capacity, session.blocks)
        )
        request.blocks, request.num_computed_tokens = [], 0 if session is None else session.tokens - 1
        return True

    def allocate(self, request: Request, tokens: int) -> None:
        request.blocks += self.pool.allocate(self.blocks_needed(request, tokens) - len(request.blocks))
        state = bounded_state(request)
        self.copies += zip(state.source, request.blocks, strict=False)
        state.source = []

    def commit(self, request: Request) -> None:
        """Do nothing: a bounded cache changes until its request has finished, so it cannot be shared before."""

    def schedulable_tokens(self, request: Request, budget: int, chunk_size: int) -> int:
        """Return the tokens until the cache is full, in complete chunks: what is kept depends on the text alone."""
        computed = request.num_computed_tokens
        count = min(request.num_expected_tokens - computed, chunk_size, self.size.tokens_until_full(computed))
        return count if count <= budget else 0

    def can_allocate(self, blocks: int) -> bool:
        if blocks > self.pool.num_free_blocks + self._session_blocks:
            return False
        while blocks > self.pool.num_free_blocks:
            self._drop_session()
        return True

    def release(self, request: Request, reason: str) -> None:
        if self.reuse and reason in ("stop", "length") and request.num_computed_tokens == len(request.tokens) - 1:
            self._keep_session(request)
        super().release(request, reason)
        request.cache_state = None

    def max_request_tokens(self, max_model_len: int) -> int:
        return max_model_len

    def drop_sessions(self) -> None:
        while len(self.sessions):
            self._drop_session()

    def state(self) -> dict[str, int]:
        used = self.pool.num_blocks - self.pool.num_free_blocks - self._session_blocks
        return {"blocks": self.pool.num_blocks, "blocks_used": used, "blocks_carried": self._session_blocks}

    def _find(self, request: Request) -> BoundedSession | None:
        if not self.reuse:
            return None
        return self.sessions.find(root_hash(request.salt, request.adapter), request.tokens)

    def _keep_session(self, request: Request) -> None:
        """Hand the filled blocks over to the session cache."""
        count = self.pool.blocks_for(self.size.length(request.num_computed_tokens))
        session = BoundedSession(len(request.tokens), request.blocks[:count], bounded_state(request).trimmed())
        if self.sessions.add(root_hash(request.salt, request.adapter), request.tokens, session):
            self._session_blocks += count
            request.blocks = request.blocks[count:]

    def _drop_session(self) -> None:
        blocks = self.sessions.drop().blocks
        self._session_blocks -= len(blocks)
        self.pool.release(blocks)


def bounded_state(request: Request) -> BoundedCacheState:
    assert isinstance(request.cache_state, BoundedCacheState)
    return request.cache_state
