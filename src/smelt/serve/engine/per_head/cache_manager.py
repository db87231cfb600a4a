"""Pages of head clusters: reserved when a request is admitted, kept until it ends, and reusable in the next turn.

The last token of a prompt is computed by itself, so that a request with the same prompt, or one that continues it,
finds all that is kept of the tokens before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smelt.kvcache.eviction.policy import ClusterCounts, EvictionPolicy, RequestRetention
from smelt.serve.engine.blocks import BlockPool, root_hash
from smelt.serve.engine.kv_cache_manager import KVCacheManager
from smelt.serve.engine.request import CacheState, Request, RequestStatus
from smelt.serve.engine.session_cache import SessionCache


@dataclass(eq=False)
class PerHeadCacheState(CacheState):
    """The pages of a request. `entries` are those of its block table row, cluster * width + page, one per block."""

    retention: RequestRetention
    pages: ClusterCounts  # per cluster
    entries: list[int] = field(default_factory=list)
    tails: dict[int, int] = field(default_factory=dict)  # table entry -> shared partial page, to be copied
    capacity: int = -1  # tokens up to which no further page is needed


@dataclass(frozen=True)
class PerHeadSession:
    """The first `tokens` of a text, as retained by its clusters."""

    tokens: int
    lengths: ClusterCounts  # per cluster
    pages: dict[int, int]  # block table entry -> page


class PerHeadCacheManager(KVCacheManager):
    """At most `width` pages per cluster."""

    def __init__(self, pool: BlockPool, policy: EvictionPolicy, width: int, *, reuse: bool = True) -> None:
        self.pool, self.policy, self.width, self.reuse = pool, policy, width, reuse
        self.sessions: SessionCache[PerHeadSession] = SessionCache()
        self.copies = []
        self._users = [0] * pool.num_blocks  # requests that use a page
        self._num_used = 0  # pages with at least one

    def blocks_needed(self, request: Request, tokens: int) -> int:
        state = request.cache_state
        if state is None:
            return int(RequestRetention.empty(self.policy, len(request.tokens) - 1).num_pages(tokens).sum())
        assert isinstance(state, PerHeadCacheState)
        if tokens <= state.capacity:
            return len(request.blocks)
        return int(state.retention.num_pages(tokens).sum())

    def admit(self, request: Request, reserved: int) -> bool:
        session = self._find(request)
        state = self._initial_state(request, session)
        shared = [] if session is None else [session.pages[entry] for entry in state.entries]
        self.pool.share(shared)
        self._use(shared)
        request.cache_state, request.blocks, request.num_computed_tokens = state, shared, state.retention.start
        if self.can_allocate(self.blocks_needed(request, request.num_expected_tokens) - len(shared) + reserved):
            return True
        self.release(request, "")
        request.num_computed_tokens = 0
        return False

    def allocate(self, request: Request, tokens: int) -> None:
        state = per_head_state(request)
        needed = state.retention.num_pages(tokens)
        entries = missing_entries(state.pages, needed, self.width)
        pages = self.pool.allocate(len(entries))
        self._use(pages)
        self.copies += [
            (state.tails.pop(entry), page) for entry, page in zip(entries, pages, strict=True) if entry in state.tails
        ]
        request.blocks += pages
        state.entries += entries
        state.pages = needed
        state.capacity = _capacity(state.retention, needed, tokens)

    def commit(self, request: Request) -> None:
        """Make a prompt that was read completely reusable, by this conversation or another."""
        state = request.cache_state
        if request.state is not RequestStatus.RUNNING or state is None or request.registered:
            return
        assert isinstance(state, PerHeadCacheState)
        if request.num_computed_tokens >= state.retention.stop > state.retention.start:
            self._keep_session(request, state.retention.stop)
            request.registered = 1

    def schedulable_tokens(self, request: Request, budget: int, chunk_size: int) -> int:
        """Schedule complete chunks of a prompt, so that what is kept does not depend on other requests."""
        state = per_head_state(request)
        if request.num_computed_tokens < state.retention.stop:
            count = state.retention.next_chunk(request.num_computed_tokens, chunk_size)
            return count if count <= budget else 0
        return min(request.num_expected_tokens - request.num_computed_tokens, budget)

    def can_allocate(self, blocks: int) -> bool:
        if blocks > self.pool.num_blocks - self._num_used:
            return False
        while blocks > self.pool.num_free_blocks:
            self.pool.release(list(self.sessions.drop().pages.values()))
        return True

    def release(self, request: Request, reason: str) -> None:
        state = request.cache_state
        computed = min(request.num_computed_tokens, len(request.tokens) - 1)
        if reason in ("stop", "length") and isinstance(state, PerHeadCacheState) and computed > state.retention.stop:
            self._keep_session(request, computed)
        for page in request.blocks:
            self._users[page] -= 1
            self._num_used -= self._users[page] == 0
        super().release(request, reason)
        request.cache_state, request.registered = None, 0

    def drop_sessions(self) -> None:
        while len(self.sessions):
            self.pool.release(list(self.sessions.drop().pages.values()))

    def state(self) -> dict[str, int]:
        carried = self.pool.num_blocks - self.pool.num_free_blocks - self._num_used
        return {"blocks": self.pool.num_blocks, "blocks_used": self._num_used, "blocks_carried": carried}

    def _find(self, request: Request) -> PerHeadSession | None:
        if not self.reuse:
            return None
        return self.sessions.find(root_hash(request.salt, request.adapter), request.tokens)

    def _initial_state(self, request: Request, session: PerHeadSession | None) -> PerHeadCacheState:
        """Share full pages; copy one that will be written to again."""
        stop = len(request.tokens) - 1
        if session is None:
            retention = RequestRetention.empty(self.policy, stop)
            return PerHeadCacheState(retention, np.zeros_like(retention.carried))
        full = session.lengths // self.policy.block_size
        entries = missing_entries(np.zeros_like(full), full, self.width)
        shared = set(entries)
        tails = {entry: page for entry, page in session.pages.items() if entry not in shared}
        retention = RequestRetention(self.policy, session.lengths, session.tokens, stop)
        return PerHeadCacheState(retention, full, entries, tails)

    def _keep_session(self, request: Request, tokens: int) -> None:
        if not self.reuse:
            return
        state = per_head_state(request)
        lengths = state.retention.lengths(tokens)
        filled = set(missing_entries(np.zeros_like(lengths), -(-lengths // self.policy.block_size), self.width))
        pages = {entry: page for entry, page in zip(state.entries, request.blocks, strict=True) if entry in filled}
        root = root_hash(request.salt, request.adapter)
        if self.sessions.add(root, request.tokens, PerHeadSession(tokens, lengths, pages)):
            self.pool.share(list(pages.values()))

    def _use(self, pages: list[int]) -> None:
        for page in pages:
            self._num_used += self._users[page] == 0
            self._users[page] += 1


def per_head_state(request: Request) -> PerHeadCacheState:
    assert isinstance(request.cache_state, PerHeadCacheState)
    return request.cache_state


def missing_entries(pages: ClusterCounts, needed: ClusterCounts, width: int) -> list[int]:
    """Return the block table entries that clusters with `pages` pages lack to have `needed`."""
    missing: Any = np.maximum(needed - pages, 0)
    begin = np.repeat(np.arange(len(pages)) * width + pages, missing)
    within = np.arange(missing.sum()) - np.repeat(missing.cumsum() - missing, missing)
    return list((begin + within).tolist())


def _capacity(retention: RequestRetention, pages: ClusterCounts, tokens: int) -> int:
    """Return how many tokens fit into `pages` of each cluster."""
    free = pages * retention.policy.block_size - retention.lengths(max(tokens, retention.stop))
    return max(tokens, retention.stop) + int(free.min())
