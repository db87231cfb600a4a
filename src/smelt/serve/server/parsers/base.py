"""Parse the text of an answer as it arrives, into content, reasoning and tool calls.

A parser is a generator that reads characters and suspends where it needs more. So it depends on the text alone, never
on how the text was split, and a complete text is parsed by the same code as a stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

MAX_DEPTH = 100  # of nested JSON
_LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_LITERAL_CHARACTERS = frozenset("0123456789+-.eEtrufalsn")
_WHITESPACE = frozenset(" \t\r\n")
_STRING_END = re.compile(r'["\\]')


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """A fragment of the arguments of the last call, which concatenate to JSON."""

    text: str


Part = Content | Reasoning | CallStart | CallArguments
Steps = Generator[None, None, None]  # suspends where more text is needed


class NotACallError(Exception):
    """The text is no tool call, so it is content."""


def merge_parts(parts: Iterable[Part]) -> list[Part]:
    """Concatenate neighbors of the same type, and drop empty ones."""
    merged: list[Part] = []
    for part in parts:
        if isinstance(part, CallStart):
            merged.append(part)
        elif part.text and merged and type(merged[-1]) is type(part) and not isinstance(merged[-1], CallStart):
            merged[-1] = type(part)(merged[-1].text + part.text)
        elif part.text:
            merged.append(part)
    return merged


class TextParser:
    """Base class: the text that was not consumed yet, and primitives to read it."""

    def __init__(self) -> None:
        self._buffer, self._position, self._final = "", 0, False
        self._parts: list[Part] = []
        self._steps = self._run()

    def feed(self, text: str) -> list[Part]:
        """Add text and return what is certain now."""
        self._buffer += text
        return self._advance()

    def finish(self) -> list[Part]:
        """Return what was held back."""
        self._final = True
        return self._advance()

    def parse(self, text: str) -> list[Part]:
        """Parse a complete text."""
        return merge_parts(self.feed(text) + self.finish())

    def _run(self) -> Steps:
        raise NotImplementedError

    def _advance(self) -> list[Part]:
        next(self._steps, None)
        parts, self._parts = merge_parts(self._parts), []
        return parts

    def _emit(self, part: Part) -> None:
        self._parts.append(part)

    def _consume(self, end: int) -> str:
        """Remove the text up to a position from the buffer and return it."""
        text, self._buffer, self._position = self._buffer[:end], self._buffer[end:], 0
        return text

    def _available(self) -> Generator[None, None, bool]:
        """Wait for the next character; return False at the end of the text."""
        while self._position >= len(self._buffer):
            if self._final:
                return False
            yield
        return True

    def _skip_whitespace(self) -> Steps:
        while (yield from self._available()) and self._buffer[self._position] in _WHITESPACE:
            self._position += 1

    def _starts_with(self, literal: str) -> Generator[None, None, bool]:
        """Return whether a literal comes next, reading no more of it than is needed; it is not consumed."""
        for index, character in enumerate(literal):
            while self._position + index >= len(self._buffer):
                if self._final:
                    return False
                yield
            if self._buffer[self._position + index] != character:
                return False
        return True

    def _expect(self, literal: str) -> Steps:
        if not (yield from self._starts_with(literal)):
            raise NotACallError
        self._position += len(literal)

    def _read_until(self, end: str, limit: int) -> Generator[None, None, str]:
        """Consume a text of at most `limit` characters and the literal that ends it; return the text."""
        start = self._position
        while (found := self._buffer.find(end, start)) < 0:
            if self._final or len(self._buffer) - start > limit + len(end):
                raise NotACallError
            yield
        if found - start > limit:
            raise NotACallError
        self._position = found + len(end)
        return self._buffer[start:found]

    def _copy_until(self, ends: Sequence[str], part: type[Content] | type[Reasoning]) -> Generator[None, None, str]:
        """Emit text up to the first of some literals, and return that one without consuming it, or "" at the end.

        White space before it is left in the buffer, at whose `_position` the literal begins. No literal is a prefix of
        another.
        """
        while True:
            found = [(position, end) for end in ends if (position := self._buffer.find(end)) >= 0]
            stop, end = min(found, default=(len(self._buffer), ""))
            if not end and not self._final:
                stop -= max((overlap(self._buffer, each) for each in ends), default=0)
            text = self._buffer[:stop].rstrip(" \t\r\n")
            self._emit(part(self._consume(len(text))))
            self._position = stop - len(text)
            if end or self._final:
                return end
            yield

    def _json(self, fragments: bool = False) -> Generator[None, None, str]:
        """Consume a JSON object or array and return its text; with `fragments`, emit it as it arrives instead."""
        scanner, start = JsonScanner(), self._position
        while True:
            self._position = scanner.feed(self._buffer, self._position)
            if fragments:
                self._emit(CallArguments(self._consume(self._position)))
            if scanner.done:
                return self._buffer[start : self._position]
            if self._final:
                raise NotACallError
            yield


def overlap(text: str, literal: str) -> int:
    """Return the length of the longest end of the text that is a proper prefix of the literal."""
    lengths = range(min(len(literal) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(literal[:length])), 0)


class JsonScanner:
    """Find the end of a JSON object or array; raise NotACallError at the first character that cannot be in it.

    Line breaks in strings are accepted, as models write them.
    """

    def __init__(self) -> None:
        self.done = False
        self._closers: list[str] = []  # of the open objects and arrays
        self._state = "start"
        self._after_string = ""
        self._literal = ""

    def feed(self, text: str, start: int) -> int:
        """Scan on from a position; return the position behind the last character that was read."""
        position = start
        while position < len(text) and not self.done:
            if self._state == "string":
                position = self._skip_string(text, position)
                continue
            character = text[position]
            if self._state == "literal":
                if character in _LITERAL_CHARACTERS:
                    self._literal += character
                    position += 1
                    continue
                if not _LITERAL.fullmatch(self._literal):
                    raise NotACallError
                self._state = "next"
            position += 1
            if self._state == "escape":
                self._state = "string"
            elif character not in _WHITESPACE or self._state == "start":
                self._structure(character)
        return position

    def _skip_string(self, text: str, position: int) -> int:
        match = _STRING_END.search(text, position)
        if match is None:
            return len(text)
        self._state = "escape" if match[0] == "\\" else self._after_string
        return match.end()

    def _structure(self, character: str) -> None:
        """Read a character outside of strings and literals."""
        state = self._state
        if state in ("key", "key or end") and character == '"':
            self._state, self._after_string = "string", "colon"
        elif state == "colon" and character == ":":
            self._state = "value"
        elif state in ("next", "key or end", "value or end") and self._closers and character == self._closers[-1]:
            self._closers.pop()
            self._state, self.done = "next", not self._closers
        elif state == "next" and character == ",":
            self._state = "key" if self._closers[-1] == "}" else "value"
        elif state in ("start", "value", "value or end"):
            self._value(character)
        else:
            raise NotACallError

    def _value(self, character: str) -> None:
        if character in "{[" and len(self._closers) < MAX_DEPTH:
            self._closers.append("}" if character == "{" else "]")
            self._state = "key or end" if character == "{" else "value or end"
        elif self._state == "start":
            raise NotACallError
        elif character == '"':
            self._state, self._after_string = "string", "next"
        elif character in _LITERAL_CHARACTERS:
            self._state, self._literal = "literal", character
        else:
            raise NotACallError


@dataclass(frozen=True)
class CallSyntax:
    """The text of tool calls when a grammar constrains them: opening, calls between separators, closing."""

    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str | None = None  # None: one call only
    opening: str = ""
    closing: str = ""

    @property
    def trigger(self) -> str:
        """Return the text that begins calls."""
        return self.opening + self.before_name


class ToolCallParser(TextParser):
    """Base class of the formats of tool calls. A call is valid if its function is one of those that were offered.

    Calls are held back until they are complete and valid, since what is no call is content. If a grammar constrains
    them, their arguments are emitted as they arrive.
    """

    syntax: ClassVar[CallSyntax]
    triggers: ClassVar[Sequence[str]]  # texts that begin a call
    markers: ClassVar[Sequence[str]] = ()  # tokens that are special in most tokenizers, and needed to find calls

    def __init__(self, functions: Collection[str], constrained: bool = False) -> None:
        super().__init__()
        self._functions, self._constrained = frozenset(functions), constrained
        self._called = False  # whether there was a call
        self._started = False  # whether a part of the current calls was emitted

    def _run(self) -> Steps:
        triggers = [self.syntax.trigger] if self._constrained else self.triggers
        while trigger := (yield from self._copy_until(triggers, Content)):
            end, self._started = self._position + len(trigger), False
            try:
                yield from self._constrained_calls() if self._constrained else self._calls(trigger)
                self._consume(self._position)
                self._called = True
            except NotACallError:
                self._called = self._called or self._started
                if not self._started:
                    self._emit(Content(self._consume(end)))
        if not self._called:  # otherwise white space after the last call
            self._emit(Content(self._consume(len(self._buffer))))

    def _calls(self, trigger: str) -> Steps:
        """Read calls from the trigger on, and emit them once they are valid; raise NotACallError otherwise."""
        raise NotImplementedError

    def _constrained_calls(self) -> Steps:
        syntax = self.syntax
        yield from self._expect(syntax.opening)
        while True:
            yield from self._expect(syntax.before_name)
            name = yield from self._read_until(syntax.before_arguments, limit=256)
            self._consume(self._position)
            self._emit(CallStart(name))
            self._started = True
            yield from self._json(fragments=True)
            yield from self._expect(syntax.after_arguments)
            self._consume(self._position)
            if syntax.separator is None or not (yield from self._starts_with(syntax.separator + syntax.before_name)):
                break
            self._position += len(syntax.separator)
        yield from self._expect(syntax.closing)

    def _emit_call(self, name: Any, arguments: Any) -> None:
        self._check_call(name, arguments)
        self._emit(CallStart(name))
        self._emit(CallArguments(json.dumps(arguments, ensure_ascii=False)))

    def _check_call(self, name: Any, arguments: Any) -> None:
        if not isinstance(name, str) or name not in self._functions or not isinstance(arguments, dict):
            raise NotACallError

    def _emit_call_objects(self, text: str) -> None:
        """Emit the calls of a JSON object, or of an array of them; raise NotACallError if any is invalid."""
        values = load_json(text)
        calls = [read_call(value) for value in (values if isinstance(values, list) else [values])]
        if not calls:
            raise NotACallError
        for call in calls:
            self._check_call(*call)
        for call in calls:
            self._emit_call(*call)


def load_json(text: str) -> Any:
    """Read JSON that can be written again."""
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise NotACallError from error
    return value


def read_call(value: Any) -> tuple[Any, Any]:
    """Return name and arguments of a call written as a JSON object, under the keys that models use."""
    if not isinstance(value, dict):
        raise NotACallError
    value = value["function"] if isinstance(value.get("function"), dict) else value
    keys = [key for key in ("arguments", "parameters") if key in value]
    arguments: Any = value[keys[0]] if keys else {} if len(value) == 1 else None
    if isinstance(arguments, str):
        arguments = load_json(arguments)
    return value.get("name"), arguments
