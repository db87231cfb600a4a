"""Refuse regular expressions of a tokenizer that take exponential time or recurse.

The tokenizers library matches with backtracking and gives up with a panic after ten million steps per match, each of
which may start anew at the next character. The expressions of published tokenizers repeat single characters and classes
of them, never a group that itself repeats something.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MAX_LENGTH = 20_000
_MAX_REPEATS = 3  # of any length, in one alternative; published ones have two
_MANY = 64  # repeats of a group up to which they do not count as any number
# One element of an expression. A class may contain classes and escaped brackets.
_TOKEN = re.compile(
    r"(?P<escape>\\[pP]\{[^}]*\}|\\x\{[^}]*\}|\\.)"
    r"|(?P<open>\((?:\?(?:[a-zA-Z-]*:|[=!>|]|<[=!]|<\w+>|[a-zA-Z-]+(?=\))|.)?)?)"
    r"|(?P<close>\))|(?P<bar>\|)"
    r"|(?P<repeat>[*+?][+?]?|\{\d*,?\d*\}[+?]?)"
    r"|(?P<bracket>\[)|(?P<other>.)",
    re.DOTALL,
)
_SAFE_GROUP = re.compile(r"\((?:\?(?:[imxsu-]*:|[=!>]|<[=!]|<\w+>|[imxsu-]+))?")


@dataclass
class _Group:
    """What an open group contains so far."""

    repeats: int = 0  # of any length, in the current alternative
    most_repeats: int = 0
    varies: bool = False  # whether it can match one text in several ways


def check_regex(pattern: str) -> str | None:
    """Return what is wrong with the expression, to follow its name in a sentence; None if it is accepted."""
    if len(pattern) > _MAX_LENGTH:
        return f"has more than {_MAX_LENGTH} characters"
    stack, closed, position = [_Group()], None, 0
    while position < len(pattern):
        match = _TOKEN.match(pattern, position)
        assert match is not None  # the last branch takes any character
        kind, text = match.lastgroup, match[0]
        position = _end_of_class(pattern, position) if kind == "bracket" else match.end()
        if kind == "escape" and ((text[1].isdigit() and text[1] != "0") or text[1] in "kgKXRO"):
            return "refers to its own groups"
        if kind == "open":
            if not _SAFE_GROUP.fullmatch(text):
                return "has a group of an unsupported kind"
            stack.append(_Group())
        elif kind == "bar":
            stack[-1].varies, stack[-1].repeats = True, 0
        elif kind == "repeat" and (problem := _repeat(stack[-1], closed, text)):
            return problem
        closed = None
        if kind == "close":
            if len(stack) == 1:
                return "has an unmatched parenthesis"
            closed = stack.pop()
            outer = stack[-1]
            outer.repeats += closed.most_repeats
            outer.most_repeats, outer.varies = max(outer.most_repeats, outer.repeats), outer.varies or closed.varies
        if stack[-1].most_repeats > _MAX_REPEATS:
            return f"repeats more than {_MAX_REPEATS} things in a row"
    return None if len(stack) == 1 else "has an unmatched parenthesis"


def _repeat(group: _Group, closed: _Group | None, text: str) -> str | None:
    """Count a repeat in its group; `closed` is the group that it repeats, if it does."""
    numbers = [int(number) for number in re.findall(r"\d{1,9}", text)]
    unbounded = text[0] in "*+" or bool(re.fullmatch(r"\{\d*,\}.?", text)) or max(numbers, default=0) > _MANY
    several = unbounded or max(numbers, default=1) > 1
    if closed is not None and several and (closed.varies or closed.most_repeats):
        return "repeats a group that can match a text in several ways"
    group.varies = group.varies or text[0] != "{" or "," in text
    if unbounded:
        group.repeats += 1
        group.most_repeats = max(group.most_repeats, group.repeats)
    return None


def _end_of_class(pattern: str, start: int) -> int:
    """Return the position after the character class that begins at `start`."""
    depth, position = 0, start
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif character == "[":
            depth += 1
            if pattern[position + 1 : position + 2] == "^":
                position += 1
            if pattern[position + 1 : position + 2] == "]":  # a literal one
                position += 1
        elif character == "]":
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    return len(pattern)
