"""A hard cap: what a server is told about the pots of its requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from smelt.errors import ConfigError
from smelt.kvcache.streaming.infinipot import InfiniPot
from smelt.kvcache.streaming.size import PotSize


@dataclass(frozen=True)
class Cap:
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

    def size(self, prompt: int, window: int | None, block: int) -> PotSize:
        """With a catalyst prompt of so many tokens, on blocks of so many. Room is left for the prompt alone, since
        answers are cooked down as well. Pots that would be cooked down more often than once a block are refused."""
        least = 2 * (prompt + block) - 1
        if self.keep is None and self.tokens < least:
            raise ConfigError(
                f"a cap of {self.tokens} tokens is too small: a half stays, the catalyst prompt takes {prompt}, and a "
                f"block of {block} must fit beside them; give at least {least}."
            )
        size = PotSize.of(self.tokens, self.keep, prompt, prompt, window)
        if size.fresh < block:
            raise ConfigError(
                f"a cap of {self.tokens} tokens that keeps {size.keep} leaves {size.fresh} beside the catalyst prompt "
                f"of {prompt}, and a block has {block}; keep at most {size.full - block}, or raise the cap."
            )
        return size
