"""How large a pot is, how much of it stays, and where each token of a text is laid. All of it follows from the number
of the token alone, so that whoever reads the same text cooks at the same places."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.errors import ConfigError


@dataclass(frozen=True)
class PotSize:
    """A pot is filled up to `cap - room`; when one more token comes, it is cooked down to `keep`. `room` is for the
    catalyst prompt, and for what else is laid behind the text and taken away again."""

    cap: int
    keep: int
    room: int

    @classmethod
    def of(cls, cap: int, keep: int | None, room: int, prompt: int, window: int | None) -> PotSize:
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
