"""Pages of pots: a request never holds more than those of its cap, however long its text is.

When the pot is cooked down, and so what is in it, depends on the text alone. What a finished request leaves is carried:
a text that goes on from it begins with a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from smelt.kvcache.streaming.config import BoundedCacheSize
from smelt.serve.engine.blocks import BlockPool, root_digest
from smelt.serve.engine.bounded.held import BoundedCacheState
from smelt.serve.engine.kv_cache_manager import KVCacheManager
from smelt.serve.engine.request import Request
from smelt.serve.engine.session_cache import CarriedTexts


@dataclass(frozen=True)
class CarriedPot:
    """What is left of all of a text but its last token, of which it is only known how novel it is."""

    tokens: int  # of the text
    pages: list[int]
    held: BoundedCacheState


class BoundedCacheManager(KVCacheManager):
    """`empty` makes what a fresh request knows of its pot."""

    def __init__(
        self, pool: BlockPool, size: BoundedCacheSize, empty: Callable[[], BoundedCacheState], *, carry: bool = True
    ) -> None:
        self.pool, self.size, self.carry = pool, size, carry
        self.texts: CarriedTexts[CarriedPot] = CarriedTexts()
        self.copies = []
        self._empty = empty
        self._carried = 0  # pages that only carried texts hold

    def needed(self, request: Request, tokens: int) -> int:
        """The whole cap, with the catalyst prompt, from the first time on that the pot is cooked down."""
        return self.pool.needed(tokens if tokens <= self.size.max_text_tokens else self.size.capacity)

    def admit(self, request: Request, promised: int) -> bool:
        found = self._found(request)
        if not self.fits(self.needed(request, request.num_expected_tokens) + promised):
            return False
        request.pot = self._empty() if found is None else found.held.begun(self.size.capacity, found.pages)
        request.blocks, request.num_computed_tokens = [], 0 if found is None else found.tokens - 1
        return True

    def grow(self, request: Request, tokens: int) -> None:
        request.blocks += self.pool.take(self.needed(request, tokens) - len(request.blocks))
        held = request.pot
        assert held is not None
        self.copies += zip(held.source, request.blocks, strict=False)
        held.source = []

    def settle(self, request: Request) -> None:
        """Pots change until their request has ended: nobody else can use them before."""

    def count(self, request: Request, budget: int, chunk: int) -> int:
        """Up to where the pot is full. Chunks are whole, so that what is kept does not depend on who else is there."""
        count = min(
            request.num_expected_tokens - request.num_computed_tokens,
            chunk,
            self.size.tokens_until_full(request.num_computed_tokens),
        )
        return count if count <= budget else 0

    def fits(self, blocks: int) -> bool:
        if blocks > self.pool.free + self._carried:
            return False
        while blocks > self.pool.free:
            self._drop()
        return True

    def leave(self, request: Request, reason: str) -> None:
        if self.carry and reason in ("stop", "length") and request.num_computed_tokens == len(request.tokens) - 1:
            self._carry(request)
        super().leave(request, reason)
        request.pot = None

    def holds(self, max_model_len: int) -> int:
        return max_model_len

    def forget(self) -> None:
        """Give back everything that is only carried."""
        while len(self.texts):
            self._drop()

    def state(self) -> dict[str, int]:
        used = self.pool.blocks - self.pool.free - self._carried
        return {"blocks": self.pool.blocks, "blocks_used": used, "blocks_carried": self._carried}

    def _found(self, request: Request) -> CarriedPot | None:
        return self.texts.find(root_digest(request.salt, request.adapter), request.tokens) if self.carry else None

    def _carry(self, request: Request) -> None:
        """Its pages go over to the text, as far as the pot is filled."""
        held, count = request.pot, self.pool.needed(self.size.length(request.num_computed_tokens))
        assert held is not None
        carried = CarriedPot(len(request.tokens), request.blocks[:count], held.at_rest())
        if self.texts.add(root_digest(request.salt, request.adapter), request.tokens, carried):
            self._carried += count
            request.blocks = request.blocks[count:]

    def _drop(self) -> None:
        pages = self.texts.drop().pages
        self._carried -= len(pages)
        self.pool.release(pages)
