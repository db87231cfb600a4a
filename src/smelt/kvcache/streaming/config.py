"""A hard cap: what a server is told about the pots of its requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from smelt.errors import ConfigError
from smelt.kvcache.streaming.infinipot import InfiniPot


@dataclass(frozen=True)
class BoundedCacheSize:
    """A pot is filled up to `cap - room`; when one more token comes, it is cooked down to `keep`. `room` is for the
    catalyst prompt, and for what else is laid behind the text and taken away again."""

    cap: int
    keep: int
    room: int

    @classmethod
    def of(cls, cap: int, keep: int | None, room: int, prompt: int, window: int | None) -> BoundedCacheSize:
        """For a catalyst prompt of so many tokens, and a network that was trained for so many. Of the paper's sizes
        only that of the pot is known: that a half is kept is a default of ours."""
        found = cls(cap, cap // 2 if keep is None else keep, room)
        if window and cap > window:
            raise ConfigError(f"the cap is {cap} tokens, and this model was trained for {window}; take no more.")
        if room < prompt:
            raise ConfigError(f"room is {room} tokens, and the catalyst prompt has {prompt}; make room larger.")
        if not 1 <= found.keep < found.full:
            raise ConfigError(
                f"a cap of {cap} tokens with {room} left free cannot keep {found.keep} and read more; "
                "keep at least 1 and fewer than cap - room."
            )
        return found

    @property
    def full(self) -> int:
        """Tokens of the text that lie in it at most."""
        return self.cap - self.room

    @property
    def fresh(self) -> int:
        """Tokens that come from one time it is cooked down to the next."""
        return self.full - self.keep

    def cooks(self, token: int) -> bool:
        """Whether the pot is full when the token with this number comes, counted from 0."""
        return token >= self.full and (token - self.full) % self.fresh == 0

    def place(self, token: int) -> int:
        """Where the token with this number is laid."""
        return token if token < self.full else self.keep + (token - self.full) % self.fresh

    def ahead(self, token: int) -> int:
        """How many tokens, this one the first, are laid until the pot is full."""
        return self.full - self.place(token)

    def length(self, tokens: int) -> int:
        """How many lie in it when so many have come."""
        return self.place(tokens - 1) + 1 if tokens else 0


@dataclass(frozen=True)
class BoundedCacheConfig:
    """Each request holds keys and values of at most so many tokens. When they are there, `keep` of them stay (a half
    unless told), by the rule."""

    tokens: int
    keep: int | None = None
    rule: InfiniPot = field(default_factory=InfiniPot)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"a cap of {self.tokens} tokens holds nothing; give some hundreds or thousands.")
        if not self.rule.renumber:
            raise ConfigError("a text without an end needs positions that are numbered anew; leave `renumber` on.")

    def size(self, prompt: int, window: int | None, block: int) -> BoundedCacheSize:
        """With a catalyst prompt of so many tokens, on blocks of so many. Room is left for the prompt alone, since
        answers are cooked down as well. Pots that would be cooked down more often than once a block are refused."""
        least = 2 * (prompt + block) - 1
        if self.keep is None and self.tokens < least:
            raise ConfigError(
                f"a cap of {self.tokens} tokens is too small: a half stays, the catalyst prompt takes {prompt}, and a "
                f"block of {block} must fit beside them; give at least {least}."
            )
        size = BoundedCacheSize.of(self.tokens, self.keep, prompt, prompt, window)
        if size.fresh < block:
            raise ConfigError(
                f"a cap of {self.tokens} tokens that keeps {size.keep} leaves {size.fresh} beside the catalyst prompt "
                f"of {prompt}, and a block has {block}; keep at most {size.full - block}, or raise the cap."
            )
        return size
