"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from smelt.serve.server.parsers.base import CallSyntax, Steps, ToolCallParser


class HermesParser(ToolCallParser):
    triggers = ("<tool_call>",)
    markers = ("<tool_call>", "</tool_call>")
    syntax = CallSyntax('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")

    def _calls(self, trigger: str) -> Steps:
        yield from self._expect(trigger)
        yield from self._skip_whitespace()
        text = yield from self._json()
        yield from self._skip_whitespace()
        yield from self._expect("</tool_call>")
        self._emit_call_objects(text)
