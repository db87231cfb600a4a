"""Bounded KV cache settings of a server, and the slot of each token, which depends on its index alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from smelt.errors import ConfigError
from smelt.kvcache.streaming.infinipot import InfiniPot


@dataclass(frozen=True)
class BoundedCacheSize:
    """Sizes of a bounded cache: it is filled up to `capacity - reserved`; the next token compresses it to `keep`.

    `reserved` slots are for the catalyst prompt and other tokens that are appended temporarily. When the cache is
    compressed depends on the token index alone, so equal texts are compressed at equal places."""

    capacity: int
    keep: int
    reserved: int

    @classmethod
    def create(
        cls, capacity: int, keep: int | None, reserved: int, prompt_len: int, max_positions: int | None
    ) -> BoundedCacheSize:
        """Check sizes for a catalyst prompt and a network trained for `max_positions`. `keep` defaults to a half, our
        choice: the paper gives only the capacity."""
        size = cls(capacity, capacity // 2 if keep is None else keep, reserved)
        if max_positions and capacity > max_positions:
            raise ConfigError(
                f"the cap is {capacity} tokens, and this model was trained for {max_positions}; take no more."
            )
        if reserved < prompt_len:
            raise ConfigError(
                f"{reserved} tokens are reserved, and the catalyst prompt has {prompt_len}; reserve more."
            )
        if not 1 <= size.keep < size.max_text_tokens:
            raise ConfigError(
                f"a cap of {capacity} tokens with {reserved} reserved cannot keep {size.keep} and read more; "
                "keep at least 1 and fewer than the cap without the reserved tokens."
            )
        return size

    @property
    def max_text_tokens(self) -> int:
        """Most tokens of the text in the cache."""
        return self.capacity - self.reserved

    @property
    def tokens_per_cycle(self) -> int:
        """Tokens between two compressions."""
        return self.max_text_tokens - self.keep

    def compresses_at(self, token: int) -> bool:
        """Return whether the cache is full when the token with this index, counted from 0, arrives."""
        return token >= self.max_text_tokens and (token - self.max_text_tokens) % self.tokens_per_cycle == 0

    def slot(self, token: int) -> int:
        """Return the slot that the token with this index is written to."""
        if token < self.max_text_tokens:
            return token
        return self.keep + (token - self.max_text_tokens) % self.tokens_per_cycle

    def tokens_until_full(self, token: int) -> int:
        """Return how many tokens fit before the next compression, the one with this index included."""
        return self.max_text_tokens - self.slot(token)

    def length(self, num_tokens: int) -> int:
        """Return how many tokens are in the cache after `num_tokens` arrived."""
        return self.slot(num_tokens - 1) + 1 if num_tokens else 0


@dataclass(frozen=True)
class BoundedCacheConfig:
    """Bound the KV cache of each request to `max_tokens`; when it is full, the method keeps `keep` of them (half by
    default)."""

    max_tokens: int
    keep: int | None = None
    method: InfiniPot = field(default_factory=InfiniPot)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"a cap of {self.max_tokens} tokens holds nothing; give some hundreds or thousands.")
        if not self.method.renumber:
            raise ConfigError("a text without an end needs renumbered positions; leave `renumber` on.")

    def size(self, prompt_len: int, max_positions: int | None, block_size: int) -> BoundedCacheSize:
        """Compute the sizes for a catalyst prompt and a block size. Slots are reserved for the prompt alone, since
        generated tokens are compressed too. Caches compressed more often than once per block are refused."""
        least = 2 * (prompt_len + block_size) - 1
        if self.keep is None and self.max_tokens < least:
            raise ConfigError(
                f"a cap of {self.max_tokens} tokens is too small: half is kept, the catalyst prompt takes "
                f"{prompt_len}, and a block of {block_size} must fit beside them; give at least {least}."
            )
        size = BoundedCacheSize.create(self.max_tokens, self.keep, prompt_len, prompt_len, max_positions)
        if size.tokens_per_cycle < block_size:
            raise ConfigError(
                f"a cap of {self.max_tokens} tokens that keeps {size.keep} leaves {size.tokens_per_cycle} beside the "
                f"catalyst prompt of {prompt_len}, and a block has {block_size}; keep at most "
                f"{size.max_text_tokens - block_size}, or raise the cap."
            )
        return size
