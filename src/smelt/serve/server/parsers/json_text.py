"""Any model: JSON objects with `name` and `arguments` anywhere in the text, alone, in an array, or in a code fence."""

from __future__ import annotations

from smelt.serve.server.parsers.base import CallSyntax, Steps, ToolCallParser

_FENCE = "```"


class JsonTextParser(ToolCallParser):
    triggers = ("{", "[", _FENCE)
    syntax = CallSyntax('{"name": "', '", "arguments": ', "}", separator="\n")

    def _calls(self, trigger: str) -> Steps:
        if trigger == _FENCE:
            yield from self._expect(_FENCE)
            if (yield from self._starts_with("json")):
                self._position += len("json")
            yield from self._skip_whitespace()
        text = yield from self._json()
        if trigger == _FENCE:
            yield from self._skip_whitespace()
            yield from self._expect(_FENCE)
        self._emit_call_objects(text)
