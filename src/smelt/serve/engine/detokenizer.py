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
MAX_PARTIAL_TOKENS = 3  # tokens that spell the beginning of a character: it has at most four bytes
MIN_WINDOW = 6  # tokens before the new ones that are decoded with them


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
        self._tokens = self._drop_partial_character(prompt[-MIN_WINDOW:])
        self._num_decoded = len(self._tokens)  # tokens whose text is in `_pending` or was returned already
        self._segment_starts = deque([0])  # token indices at which a character begins; the window begins at the first
        self._pending = ""  # text held back: it may begin a stop string
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
        self._pending += self._decode_new(final=False)
        return self._release(final=False)

    def finish(self) -> str:
        """Return what was held back."""
        if self.stopped is not None:
            return ""
        self._pending += self._decode_new(final=True)
        return self._release(final=True)

    def _decode_new(self, final: bool) -> str:
        """Return the text of tokens that were not decoded yet, up to an incomplete character."""
        while len(self._segment_starts) > 1 and self._segment_starts[1] <= self._num_decoded - MIN_WINDOW:
            self._segment_starts.popleft()
        start = self._segment_starts[0]
        before = self._decode(self._tokens[start : self._num_decoded])
        text = self._decode(self._tokens[start:])
        end = len(self._tokens)
        if text.endswith(INCOMPLETE) and not final:
            end, text = self._complete_prefix(start, before, text)
        if end > self._num_decoded:
            self._segment_starts.append(self._num_decoded)
        self._num_decoded = end
        return text[len(before) :]

    def _complete_prefix(self, start: int, before: str, full_text: str) -> tuple[int, str]:
        """Return how many tokens spell complete characters, and their text. Bytes that begin no character are decoded
        once there are more tokens than a character has bytes."""
        first = max(self._num_decoded, len(self._tokens) - MAX_PARTIAL_TOKENS)
        for end in range(len(self._tokens) - 1, first - 1, -1):
            text = self._decode(self._tokens[start:end])
            if not text.endswith(INCOMPLETE):
                return end, text
        return (
            (first, text) if first < len(self._tokens) and full_text.startswith(text) else (self._num_decoded, before)
        )

    def _drop_partial_character(self, tokens: Sequence[int]) -> list[int]:
        """Drop tokens at the beginning that spell the rest of a character."""
        for skipped in range(MAX_PARTIAL_TOKENS + 1):
            if not self._decode(list(tokens[skipped:])).startswith(INCOMPLETE):
                return list(tokens[skipped:])
        return list(tokens)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _release(self, final: bool) -> str:
        """Return the pending text up to a stop string, or up to what may become one."""
        ends = [(position, text) for text in self.stop if (position := self._pending.find(text)) >= 0]
        if ends:
            position, self.stopped = min(ends)
            released, self._pending = self._pending[:position], ""
            return released
        num_pending = 0 if final else self._possible_stop_length()
        released, self._pending = (
            self._pending[: len(self._pending) - num_pending],
            self._pending[len(self._pending) - num_pending :],
        )
        return released

    def _possible_stop_length(self) -> int:
        """Return how many of the last characters may be the beginning of a stop string."""
        lengths = (
            length
            for text in self.stop
            for length in range(min(len(text) - 1, len(self._pending)), 0, -1)
            if self._pending.endswith(text[:length])
        )
        return max(lengths, default=0)
