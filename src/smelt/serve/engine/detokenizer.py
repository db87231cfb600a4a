"""Incremental detokenization: complete characters only, and never any part of a stop string.

A tokenizer may spell one character with several tokens, and a token differently at the beginning of a text. So the new
text is the difference between decoding a window of tokens with and without the new ones; it is held back while it ends
in an incomplete character, or in what may become a stop string. A window begins at a character: some tokenizers decode
adjacent bytes only together, so that half a character would spoil all that follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a server imports this file before transformers
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
SPELLED = 3  # tokens at most that spell the beginning of a character: it has four bytes
WINDOW = 6  # tokens before the new ones that are decoded with them, at least


@dataclass(frozen=True)
class TextDelta:
    """New text of one answer; the last delta has a finish reason."""

    text: str
    sample: int = 0
    reason: str = ""  # stop, length or abort
    num_tokens: int = 0  # accepted: those after a stop string are not


class Detokenizer:
    """The text of one answer. `update` is all that most callers need."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stop: Sequence[str] = (), *,
        include_stop: bool = False,
    ) -> None:  # fmt: skip
        self.tokenizer, self.stop, self.include_stop = tokenizer, tuple(stop), include_stop
        self._tokens = self._after_a_character(prompt[-WINDOW:])
        self._shown = len(self._tokens)  # tokens whose text is in `_held` or was returned
        self._begins = deque([0])  # where pieces began, each with a character; the window begins at the first
        self._held = ""
        self.stopped: str | None = None  # the stop string that was found

    def update(self, tokens: Sequence[int], reason: str = "", sample: int = 0) -> TextDelta:
        """Add tokens, and the reason if they are the last; a stop string ends the answer and drops what follows it."""
        if self.stopped is not None:
            return TextDelta("", sample, "stop")
        text, count = "", len(tokens)
        if self.stop:  # any of the tokens may complete one
            for count, token in enumerate(tokens, 1):  # noqa: B007
                text += self.push([token])
                if self.stopped is not None:
                    break
        else:
            text = self.push(tokens)
        if reason:
            text += self.finish()
        if self.stopped is not None:
            return TextDelta(text + (self.stopped if self.include_stop else ""), sample, "stop", count)
        return TextDelta(text, sample, reason, count)

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that is certain now; after a stop string there is no more."""
        if self.stopped is not None:
            return ""
        self._tokens += tokens
        self._held += self._decoded(final=False)
        return self._released(final=False)

    def finish(self) -> str:
        """Return what was held back."""
        if self.stopped is not None:
            return ""
        self._held += self._decoded(final=True)
        return self._released(final=True)

    def _decoded(self, final: bool) -> str:
        while len(self._begins) > 1 and self._begins[1] <= self._shown - WINDOW:
            self._begins.popleft()
        start = self._begins[0]
        before = self._decode(self._tokens[start : self._shown])
        text = self._decode(self._tokens[start:])
        end = len(self._tokens)
        if text.endswith(INCOMPLETE) and not final:
            end, text = self._certain(start, before, text)
        if end > self._shown:
            self._begins.append(self._shown)
        self._shown = end
        return text[len(before) :]

    def _certain(self, start: int, before: str, whole: str) -> tuple[int, str]:
        """Return how many tokens spell complete characters, and their text. Bytes that begin no character are shown
        once more tokens came than a character has bytes."""
        first = max(self._shown, len(self._tokens) - SPELLED)
        for end in range(len(self._tokens) - 1, first - 1, -1):
            text = self._decode(self._tokens[start:end])
            if not text.endswith(INCOMPLETE):
                return end, text
        return (first, text) if first < len(self._tokens) and whole.startswith(text) else (self._shown, before)

    def _after_a_character(self, tokens: Sequence[int]) -> list[int]:
        """Drop the rest of a character at the beginning."""
        for skipped in range(SPELLED + 1):
            if not self._decode(list(tokens[skipped:])).startswith(INCOMPLETE):
                return list(tokens[skipped:])
        return list(tokens)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _released(self, final: bool) -> str:
        ends = [(position, text) for text in self.stop if (position := self._held.find(text)) >= 0]
        if ends:
            position, self.stopped = min(ends)
            released, self._held = self._held[:position], ""
            return released
        num_held = 0 if final else self._possible_stop()
        released, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return released

    def _possible_stop(self) -> int:
        """Return how many of the last characters may begin a stop string."""
        lengths = (
            length
            for text in self.stop
            for length in range(min(len(text) - 1, len(self._held)), 0, -1)
            if self._held.endswith(text[:length])
        )
        return max(lengths, default=0)
