"""Grammars (llguidance's Lark) of answers with tool calls, and of structured output that follows reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from smelt.serve.engine.sampling_params import StructuredOutputParams
from smelt.serve.engine.structured_output import JSON_LAYOUT
from smelt.serve.server.parsers.base import CallSyntax
from smelt.serve.server.parsers.reasoning import ReasoningTags

MAX_CALLS = 16  # in one answer
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_TEXT = r"/(.|\n)*/"
_LINE_BREAKS = r"/[ \n]{0,2}/"


class GrammarBuilder:
    """Rules of one grammar. `tokens` has the ids of markers that are tokens, which no text matches."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens, self._rules = tokens, dict[str, str]()

    def rule(self, name: str, body: str) -> str:
        self._rules[name] = body
        return name.partition("[")[0]

    def build(self, start: str) -> StructuredOutputParams:
        lines = [f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]
        return StructuredOutputParams("grammar", "\n".join(lines))

    def literal(self, text: str) -> str:
        """Return a literal text, with markers by their ids."""
        markers = "|".join(map(re.escape, self._tokens))
        pieces = re.split(f"({markers})", text) if markers else [text]
        return " ".join(
            f"<[{self._tokens[piece]}]>" if piece in self._tokens else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def text_until(self, name: str, end: str) -> str:
        """Return a rule of any text up to a literal, and the literal."""
        first = next((marker for marker in self._tokens if end.startswith(marker)), "")
        if first:
            return self.rule(name, f"{_ANY_TEXT} {self.literal(end)}")
        pattern = re.sub(r"([.^$*+?()\[\]{}|\\/])", r"\\\1", end)
        return self.rule(f"{name}[lazy]", rf"/(.|\n)*{pattern}/")

    def constraint(self, params: StructuredOutputParams) -> str:
        """Return a rule for what structured output allows."""
        if params.type == "regex":
            return self.rule("content", "/" + re.sub(r"(?<!\\)/", r"\/", params.text) + "/")
        if params.type == "grammar":
            return self.rule("content", f"%lark {{\n{params.text}\n}}")
        return self.rule(
            "content", self.json(json.loads(params.text) if params.type == "schema" else {"type": "object"})
        )

    def json(self, schema: Any) -> str:
        layout = {"x-guidance": JSON_LAYOUT, **schema} if isinstance(schema, dict) else schema
        return f"%json {json.dumps(layout)}"

    def calls(self, syntax: CallSyntax, functions: Mapping[str, Any], parallel: bool) -> str:
        """Return a rule of calls of these functions, given with the schemas of their arguments."""
        calls = []
        for index, (name, schema) in enumerate(functions.items()):
            arguments = self.rule(f"arguments_{index}", self.json(schema))
            before = self.literal(syntax.before_name + name + syntax.before_arguments)
            calls.append(self.rule(f"call_{index}", f"{before} {arguments} {self.literal(syntax.after_arguments)}"))
        call = self.rule("call", " | ".join(calls))
        more = ""
        if parallel and syntax.separator is not None:
            more = f"({self.literal(syntax.separator)} call){{0,{MAX_CALLS - 1}}}"
        return self.rule("calls", f"{self.literal(syntax.opening)} {call} {more} {self.literal(syntax.closing)}")

    def reasoning(self, tags: ReasoningTags, is_open: bool) -> str:
        """Return a rule of the reasoning before an answer, which may be left out unless the prompt has opened it."""
        text = self.text_until("reasoning_text", tags.closing)
        rest = f"{text} {_LINE_BREAKS}"
        return self.rule("reasoning", rest if is_open else f"({self.literal(tags.opening)} {rest})?")

    def analysis(self) -> str:
        """Return a rule of the analysis channel of GPT-OSS before an answer."""
        text = self.text_until("analysis_text", "<|end|>")
        before, after = self.literal("<|channel|>analysis<|message|>"), self.literal("<|start|>assistant")
        return self.rule("analysis", f"({before} {text} {after})?")
