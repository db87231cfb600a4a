"""Llama 3: an answer that is `{"name": ..., "parameters": {...}}`, several separated by `;`, or such objects after
`<|python_tag|>`.
"""

from __future__ import annotations

from smelt.serve.server.parsers.base import CallSyntax, Content, NotACallError, Steps, ToolCallParser


class Llama3Parser(ToolCallParser):
    triggers = ("<|python_tag|>",)
    markers = ("<|python_tag|>",)
    syntax = CallSyntax('{"name": "', '", "parameters": ', "}")

    def _run(self) -> Steps:
        if not self._constrained:  # without a marker, only an answer that begins with a call is one
            yield from self._skip_whitespace()
            if (yield from self._starts_with("{")):
                try:
                    yield from self._calls("")
                    self._consume(self._position)
                    self._called = True
                except NotACallError:
                    self._emit(Content(self._consume(self._buffer.index("{") + 1)))
        yield from super()._run()

    def _calls(self, trigger: str) -> Steps:
        yield from self._expect(trigger)
        texts: list[str] = []
        end = self._position
        while True:
            yield from self._skip_whitespace()
            try:
                texts.append((yield from self._json()))
            except NotACallError:
                break
            end = self._position
            yield from self._skip_whitespace()
            if not (yield from self._starts_with(";")):
                break
            self._position += 1
        self._position = end
        self._emit_call_objects(f"[{','.join(texts)}]")
