"""Parsers of what models write: a file per format of tool calls, and the registry by vLLM's names.

A model's chat template and special tokens tell its format.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from smelt.errors import ConfigError
from smelt.serve.server.parsers.base import Content, Part, ToolCallParser, merge_parts
from smelt.serve.server.parsers.harmony import HarmonyParser
from smelt.serve.server.parsers.hermes import HermesParser
from smelt.serve.server.parsers.json_text import JsonTextParser
from smelt.serve.server.parsers.llama3 import Llama3Parser
from smelt.serve.server.parsers.mistral import MistralArgsParser, MistralParser
from smelt.serve.server.parsers.reasoning import ReasoningParser, ReasoningTags

AUTO, NONE = "auto", "none"
TOOL_CALL_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "mistral_args": MistralArgsParser,
    "openai": HarmonyParser,
    "harmony": HarmonyParser,
    "json": JsonTextParser,
}
REASONING_PARSERS: dict[str, ReasoningTags] = {
    "qwen3": ReasoningTags(),
    "deepseek_r1": ReasoningTags(implied=True),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
}
# What a chat template holds, and the format that it tells; the first match decides.
_TEMPLATE_SIGNS = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (("tools", '"parameters"', "ipython"), "llama3_json"),
)
_TAGS = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
_STRINGS = re.compile(r"'[^']*'|\"[^\"]*\"")


class OutputParser:
    """Parse one answer: first its reasoning, then the tool calls in what follows."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    def feed(self, text: str) -> list[Part]:
        return self._split(self._reasoning.feed(text) if self._reasoning is not None else [Content(text)])

    def finish(self) -> list[Part]:
        parts = self._split(self._reasoning.finish() if self._reasoning is not None else [])
        return merge_parts([*parts, *(self._calls.finish() if self._calls is not None else [])])

    def _split(self, parts: Iterable[Part]) -> list[Part]:
        if self._calls is None:
            return merge_parts(parts)
        split: list[Part] = []
        for part in parts:
            split += self._calls.feed(part.text) if isinstance(part, Content) else [part]
        return merge_parts(split)


@dataclass(frozen=True)
class OutputFormat:
    """How a model writes tool calls and reasoning, and whether its chat template accepts tools."""

    calls: type[ToolCallParser] | None = None
    reasoning: ReasoningTags | None = None
    template_has_tools: bool = False
    template_has_developer: bool = False
    tokens: Mapping[str, int] = field(default_factory=dict)  # markers of the format that are tokens

    @property
    def is_harmony(self) -> bool:
        return self.calls is HarmonyParser

    def parser(self, functions: Collection[str], prompt: str, constrained: bool = False) -> OutputParser:
        """Return a parser of an answer to a prompt, with calls of these functions; without any, of reasoning alone."""
        reasoning = None
        if self.reasoning is not None:
            reasoning = ReasoningParser(self.reasoning, self.reasoning.is_open(prompt))
        wanted = self.calls is not None and (functions or self.is_harmony)
        return OutputParser(reasoning, self.calls(functions, constrained) if self.calls and wanted else None)


def select_format(
    template: str, added_tokens: Mapping[str, int], tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> OutputFormat:
    """Choose the parsers by their names, or by the chat template. `added_tokens`: ids of tokens that are no text."""
    name = tool_call_parser
    if name == AUTO:
        signs = (format_name for signs, format_name in _TEMPLATE_SIGNS if all(sign in template for sign in signs))
        name = next(signs, "json")
    calls = None if name == NONE else TOOL_CALL_PARSERS[name]
    reasoning = None if reasoning_parser in (AUTO, NONE) else REASONING_PARSERS[reasoning_parser]
    if reasoning_parser == AUTO and calls is not HarmonyParser:
        known = REASONING_PARSERS["qwen3"], REASONING_PARSERS["mistral"]
        closings = {tags.closing: tags for tags in known}
        reasoning = next((tags for end, tags in closings.items() if end in template or end in added_tokens), None)
    markers = [*(calls.markers if calls else ()), *((reasoning.opening, reasoning.closing) if reasoning else ())]
    tokens = {marker: added_tokens[marker] for marker in markers if marker in added_tokens}
    return OutputFormat(calls, reasoning, _uses_tools(template), "developer" in template, tokens)


def _uses_tools(template: str) -> bool:
    """Return whether a chat template has a variable `tools`, outside of its texts."""
    return any(re.search(r"\btools\b", _STRINGS.sub("", tag)) for tag in _TAGS.findall(template))


def check_parser_names(tool_call_parser: str, reasoning_parser: str) -> None:
    """Refuse unknown names before the model is loaded."""
    for option, name, known in (
        ("--tool-call-parser", tool_call_parser, TOOL_CALL_PARSERS),
        ("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name not in (AUTO, NONE, *known):
            raise ConfigError(f"{option} {name} is not known; choose {', '.join((AUTO, NONE, *known))}.")
