"""Reasoning before the answer: `<think>...</think>`, or `[THINK]...[/THINK]` of Mistral's models."""

from __future__ import annotations

from dataclasses import dataclass

from smelt.serve.server.parsers.base import Content, Reasoning, Steps, TextParser


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around reasoning. With `implied`, an answer begins with reasoning even if no tag opens it."""

    opening: str = "<think>"
    closing: str = "</think>"
    implied: bool = False

    def is_open(self, prompt: str) -> bool:
        """Return whether an answer to this prompt begins inside of the tags: many templates open them."""
        start, end = prompt.rfind(self.opening), prompt.rfind(self.closing)
        tail = prompt[start + len(self.opening) :] if start >= 0 else "?"
        if not tail.strip():
            return True
        closed = end >= 0 and not prompt[end + len(self.closing) :].strip()
        return self.implied and not closed


class ReasoningParser(TextParser):
    """Split the reasoning, which only the beginning of an answer may be, from the content."""

    def __init__(self, tags: ReasoningTags, is_open: bool) -> None:
        super().__init__()
        self._tags, self._is_open = tags, is_open

    def _run(self) -> Steps:
        yield from self._skip_whitespace()
        if (yield from self._starts_with(self._tags.opening)):
            self._consume(self._position + len(self._tags.opening))
            self._is_open = True
        if self._is_open:
            yield from self._skip_whitespace()
            self._consume(self._position)
            if (yield from self._copy_until([self._tags.closing], Reasoning)):
                self._consume(self._position + len(self._tags.closing))
                yield from self._skip_whitespace()
            self._consume(self._position)
        while True:
            self._emit(Content(self._consume(len(self._buffer))))
            if self._final:
                return
            yield
