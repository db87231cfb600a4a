"""From tokens to text as they come: whole characters only, and nothing of a stop text ever shown.

A tokenizer may spell one character with several tokens, and a token differently at the beginning of a text. So a piece
is what a window of tokens says more with the new ones than without them; it is held back while it ends in an unfinished
character, or in what may become a stop text. A window begins with a character: some tokenizers read bytes that stand
together only as a whole, so that half a character would spoil all that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a server imports this file before it has the time to import transformers
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"
SPELLED = 3  # tokens at most that spell the beginning of a character: it has four bytes
WINDOW = 6  # tokens before the new ones that are decoded with them, at least


class Detokenizer:
    """The text of one answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self._tokens = self._after_a_character(prompt[-WINDOW:])
        self._shown = len(self._tokens)  # tokens whose text is in `_held` or was given
        self._begins = deque([0])  # where pieces began, each with a character; the window begins at the first
        self._held = ""
        self.stopped: str | None = None  # the stop text that was met

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens. After a stop text there is no more."""
        if self.stopped is not None:
            return ""
        self._tokens += tokens
        self._held += self._decoded(final=False)
        return self._released(final=False)

    def finish(self) -> str:
        """What was held back."""
        if self.stopped is not None:
            return ""
        self._held += self._decoded(final=True)
        return self._released(final=True)

    def _decoded(self, final: bool) -> str:
        while len(self._begins) > 1 and self._begins[1] <= self._shown - WINDOW:
            self._begins.popleft()
        start = self._begins[0]
        before = self._decode(self._tokens[start : self._shown])
        whole = self._decode(self._tokens[start:])
        end = len(self._tokens)
        if whole.endswith(UNFINISHED) and not final:
            end, whole = self._certain(start, before, whole)
        if end > self._shown:
            self._begins.append(self._shown)
        self._shown = end
        return whole[len(before) :]

    def _certain(self, start: int, before: str, whole: str) -> tuple[int, str]:
        """How many tokens spell whole characters, and what. Bytes that no character begins with wait for nothing: they
        are shown as what they are when more tokens came than a character has bytes."""
        first = max(self._shown, len(self._tokens) - SPELLED)
        for end in range(len(self._tokens) - 1, first - 1, -1):
            text = self._decode(self._tokens[start:end])
            if not text.endswith(UNFINISHED):
                return end, text
        return (first, text) if first < len(self._tokens) and whole.startswith(text) else (self._shown, before)

    def _after_a_character(self, tokens: Sequence[int]) -> list[int]:
        """Without what is left of a character at their beginning."""
        for skipped in range(SPELLED + 1):
            if not self._decode(list(tokens[skipped:])).startswith(UNFINISHED):
                return list(tokens[skipped:])
        return list(tokens)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _released(self, final: bool) -> str:
        ends = [(place, text) for text in self.stop if (place := self._held.find(text)) >= 0]
        if ends:
            place, self.stopped = min(ends)
            given, self._held = self._held[:place], ""
            return given
        kept = 0 if final else self._possible_stop()
        given, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return given

    def _possible_stop(self) -> int:
        """How many of the last characters may be the beginning of a stop text."""
        lengths = (
            length
            for text in self.stop
            for length in range(min(len(text) - 1, len(self._held)), 0, -1)
            if self._held.endswith(text[:length])
        )
        return max(lengths, default=0)
