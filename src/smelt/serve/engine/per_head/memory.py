"""Pages of clusters: reserved when a request is admitted, never taken back, and carried to the next turn.

The last token of a prompt is computed by itself, so that whoever has the same prompt, or goes on from it, finds all
that is left of the tokens before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from smelt.kvcache.eviction.policy import ClusterCounts, EvictionPolicy, RequestRetention
from smelt.serve.engine.blocks import BlockPool, root_digest
from smelt.serve.engine.kv_cache_manager import KVCacheManager
from smelt.serve.engine.per_head.holding import PerHeadCacheState
from smelt.serve.engine.request import Request, RequestStatus
from smelt.serve.engine.session_cache import Carried, CarriedTexts


class PerHeadCacheManager(KVCacheManager):
    """`width` pages a cluster at most."""

    def __init__(self, pool: BlockPool, retention: EvictionPolicy, width: int, *, carry: bool = True) -> None:
        self.pool, self.retention, self.width, self.carry = pool, retention, width, carry
        self.texts: CarriedTexts[Carried] = CarriedTexts()
        self.copies = []
        self._holders = [0] * pool.blocks  # requests that hold a page
        self._used = 0  # pages with at least one

    def needed(self, request: Request, tokens: int) -> int:
        holding = request.holding
        if holding is None:
            return int(RequestRetention.empty(self.retention, len(request.tokens) - 1).num_pages(tokens).sum())
        if tokens <= holding.enough:
            return len(request.blocks)
        return int(holding.kept.num_pages(tokens).sum())

    def admit(self, request: Request, promised: int) -> bool:
        found = self._found(request)
        holding = self._begun(request, found)
        shared = [] if found is None else [found.pages[place] for place in holding.places]
        self.pool.share(shared)
        self._hold(shared)
        request.holding, request.blocks, request.num_computed_tokens = holding, shared, holding.kept.start
        if self.fits(self.needed(request, request.num_expected_tokens) - len(shared) + promised):
            return True
        self.leave(request, "")
        request.num_computed_tokens = 0
        return False

    def grow(self, request: Request, tokens: int) -> None:
        holding = request.holding
        assert holding is not None
        wanted = holding.kept.num_pages(tokens)
        places = places_between(holding.pages, wanted, self.width)
        taken = self.pool.take(len(places))
        self._hold(taken)
        self.copies += [
            (holding.tails.pop(place), page)
            for place, page in zip(places, taken, strict=True)
            if place in holding.tails
        ]
        request.blocks += taken
        holding.places += places
        holding.pages = wanted
        holding.enough = _enough(holding.kept, wanted, tokens)

    def settle(self, request: Request) -> None:
        """A prompt that was read whole can be gone on from, by this conversation or another."""
        holding = request.holding
        if request.state is not RequestStatus.RUNNING or holding is None or request.registered:
            return
        if request.num_computed_tokens >= holding.kept.stop > holding.kept.start:
            self._carry(request, holding.kept.stop)
            request.registered = 1

    def count(self, request: Request, budget: int, chunk: int) -> int:
        """Chunks are whole, so that what is kept does not depend on who else is there."""
        holding = request.holding
        assert holding is not None
        if request.num_computed_tokens < holding.kept.stop:
            count = holding.kept.next_chunk(request.num_computed_tokens, chunk)
            return count if count <= budget else 0
        return min(request.num_expected_tokens - request.num_computed_tokens, budget)

    def fits(self, blocks: int) -> bool:
        if blocks > self.pool.blocks - self._used:
            return False
        while blocks > self.pool.free:
            self.pool.release(list(self.texts.drop().pages.values()))
        return True

    def leave(self, request: Request, reason: str) -> None:
        holding = request.holding
        known = min(request.num_computed_tokens, len(request.tokens) - 1)
        if holding is not None and reason in ("stop", "length") and known > holding.kept.stop:
            self._carry(request, known)
        for page in request.blocks:
            self._holders[page] -= 1
            self._used -= self._holders[page] == 0
        super().leave(request, reason)
        request.holding, request.registered = None, 0

    def forget(self) -> None:
        """Give back everything that is only carried."""
        while len(self.texts):
            self.pool.release(list(self.texts.drop().pages.values()))

    def state(self) -> dict[str, int]:
        carried = self.pool.blocks - self.pool.free - self._used
        return {"blocks": self.pool.blocks, "blocks_used": self._used, "blocks_carried": carried}

    def _found(self, request: Request) -> Carried | None:
        """What there is of a request's text already."""
        return self.texts.find(root_digest(request.salt, request.adapter), request.tokens) if self.carry else None

    def _begun(self, request: Request, found: Carried | None) -> PerHeadCacheState:
        """Full pages are shared; one that will be written to again is copied."""
        stop = len(request.tokens) - 1
        if found is None:
            kept = RequestRetention.empty(self.retention, stop)
            return PerHeadCacheState(kept, np.zeros_like(kept.carried))
        full = found.lengths // self.retention.block_size
        places = places_between(np.zeros_like(full), full, self.width)
        own = set(places)
        tails = {place: page for place, page in found.pages.items() if place not in own}
        return PerHeadCacheState(
            RequestRetention(self.retention, found.lengths, found.tokens, stop), full, places, tails
        )

    def _carry(self, request: Request, tokens: int) -> None:
        holding = request.holding
        assert holding is not None
        if not self.carry:
            return
        lengths = holding.kept.lengths(tokens)
        wanted = set(places_between(np.zeros_like(lengths), -(-lengths // self.retention.block_size), self.width))
        pages = {place: page for place, page in zip(holding.places, request.blocks, strict=True) if place in wanted}
        root = root_digest(request.salt, request.adapter)
        if self.texts.add(root, request.tokens, Carried(tokens, lengths, pages)):
            self.pool.share(list(pages.values()))

    def _hold(self, pages: list[int]) -> None:
        for page in pages:
            self._used += self._holders[page] == 0
            self._holders[page] += 1


def places_between(have: ClusterCounts, wanted: ClusterCounts, width: int) -> list[int]:
    """Those of the pages that clusters with `have` need to have `wanted`."""
    more: Any = np.maximum(wanted - have, 0)
    begin = np.repeat(np.arange(len(have)) * width + have, more)
    within = np.arange(more.sum()) - np.repeat(more.cumsum() - more, more)
    return list((begin + within).tolist())


def _enough(kept: RequestRetention, pages: ClusterCounts, tokens: int) -> int:
    """Tokens that fit into so many pages of each cluster."""
    room = pages * kept.policy.block_size - kept.lengths(max(tokens, kept.stop))
    return max(tokens, kept.stop) + int(room.min())
