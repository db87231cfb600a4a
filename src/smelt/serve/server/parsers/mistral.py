"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]name[ARGS]{...}` of newer models."""

from __future__ import annotations

from smelt.serve.server.parsers.base import CallSyntax, Steps, ToolCallParser, load_json


class MistralParser(ToolCallParser):
    triggers = ("[TOOL_CALLS]",)
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    syntax = CallSyntax('{"name": "', '", "arguments": ', "}", separator=", ", opening="[TOOL_CALLS][", closing="]")

    def _calls(self, trigger: str) -> Steps:
        yield from self._expect(trigger)
        yield from self._skip_whitespace()
        if (yield from self._starts_with("[")) or (yield from self._starts_with("{")):
            self._emit_call_objects((yield from self._json()))
            return
        head = yield from self._read_until("[ARGS]", limit=256)
        name = head.partition("[CALL_ID]")[0].strip()
        yield from self._skip_whitespace()
        self._emit_call(name, load_json((yield from self._json())))


class MistralArgsParser(MistralParser):
    """Newer models: the same calls are found, but a grammar makes the model write the newer form."""

    syntax = CallSyntax("[TOOL_CALLS]", "[ARGS]", "", separator="")
