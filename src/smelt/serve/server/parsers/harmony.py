"""GPT-OSS (harmony): messages in channels. The analysis channel is reasoning, the final one content, and a message to
`functions.NAME` a call.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from smelt.serve.server.parsers.base import (
    CallArguments,
    CallStart,
    CallSyntax,
    Content,
    NotACallError,
    Reasoning,
    Steps,
    ToolCallParser,
    load_json,
    overlap,
)

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_MAX_HEADER = 512


class HarmonyParser(ToolCallParser):
    triggers = _ENDS[3:]
    markers = (*_ENDS, "<|message|>", "<|constrain|>")
    syntax = CallSyntax("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "")

    def _run(self) -> Steps:
        channel = ""
        while True:
            end = yield from self._body(channel)
            if not end:
                return
            if end in self.triggers:
                try:
                    header = yield from self._header()
                except NotACallError:
                    self._emit(Content(self._consume(len(self._buffer) if self._final else len(end))))
                    continue
                match = _CHANNEL.search(header)
                channel = match[1] if match else "final"
                if match := _FUNCTION.search(header):
                    yield from self._call(match[1])
                    channel = ""
            else:
                self._consume(len(end))
                channel = ""

    def _header(self) -> Generator[None, None, str]:
        header = yield from self._read_until("<|message|>", limit=_MAX_HEADER)
        self._consume(self._position)
        return header

    def _body(self, channel: str) -> Generator[None, None, str]:
        """Emit the text of a message, and return the marker that ends it."""
        end = yield from self._copy_until(_ENDS, Reasoning if channel == "analysis" else Content)
        self._consume(self._position)  # white space
        return end

    def _call(self, name: str) -> Steps:
        """Read the arguments up to the end of the message."""
        streamed = self._constrained and name in self._functions
        if streamed:
            self._emit(CallStart(name))
        while not (ends := [found for end in _ENDS if (found := self._buffer.find(end)) >= 0]):
            if streamed:
                held = max(overlap(self._buffer, end) for end in _ENDS)
                self._emit(CallArguments(self._consume(len(self._buffer) - held)))
            if self._final:
                break
            yield
        text = self._consume(min(ends, default=len(self._buffer)))
        if streamed:
            self._emit(CallArguments(text))
            return
        try:
            self._emit_call(name, load_json(text))
        except NotACallError:
            self._emit(Content(text))
