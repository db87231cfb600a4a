"""Prompts of a load test: random words of the default text, or rows of a file, chosen by the seed."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.data.files import read_rows
from smelt.data.text import load_text
from smelt.errors import DataError, RequestError

MAX_LENGTH = 1_000_000


@dataclass(frozen=True)
class LengthRange:
    """A fixed length, or a uniform range: `128` or `64:256`."""

    low: int
    high: int

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        match = re.fullmatch(r"(\d{1,7})(?::(\d{1,7}))?", text.strip())
        low = int(match[1]) if match else 0
        high = int(match[2] or low) if match else 0
        if not 1 <= low <= high <= MAX_LENGTH:
            raise RequestError(f"{text!r:.40} is not a length; use a number such as 128, or a range such as 64:256.")
        return cls(low, high)


@dataclass(frozen=True)
class Prompt:
    """One request's content: a text, the tokens of one, or the messages of a chat; and how long the answer may be."""

    content: str | list[int] | list[dict[str, Any]]
    output: int

    @property
    def messages(self) -> list[dict[str, Any]]:
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        return [entry for entry in self.content if isinstance(entry, dict)]


def random_prompts(count: int, words: LengthRange, output: LengthRange, seed: int = 0) -> list[Prompt]:
    """Draw random words of the default text, so that no two prompts share a prefix."""
    generator = random.Random(f"prompts {seed}")
    vocabulary = load_text("default").joined.split()
    return [
        Prompt(" ".join(generator.choices(vocabulary, k=words.draw(generator))), output.draw(generator))
        for _ in range(count)
    ]


def read_prompts(path: Path, count: int, output: LengthRange, *, chat: bool, seed: int = 0) -> list[Prompt]:
    """Read rows with a `prompt`, or with `messages` for a chat; `max_tokens` in a row limits its answer."""
    generator, rows = random.Random(f"prompts {seed}"), read_rows(path)
    contents = [_from_row(row, f"{path} row {number}", chat) for number, row in enumerate(rows, 1)]
    prompts: list[Prompt] = []
    while len(prompts) < count:  # every row once in a random order, then all of them again
        for content, max_tokens in generator.sample(contents, len(contents)):
            prompts.append(Prompt(content, max_tokens or output.draw(generator)))
    return prompts[:count]


def _from_row(row: dict[str, Any], where: str, chat: bool) -> tuple[str | list[dict[str, Any]], int]:
    max_tokens = row.get("max_tokens", 0)
    if type(max_tokens) is not int or not 0 <= max_tokens <= MAX_LENGTH:
        raise DataError(f"{where} has max_tokens {max_tokens!r:.40}, which is not a number of tokens.")
    messages = row.get("messages")
    if chat and isinstance(messages, list) and messages and all(isinstance(entry, dict) for entry in messages):
        return messages, max_tokens
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        required = "`messages` (a list of objects) or `prompt` (a text)" if chat else "`prompt` (a text)"
        raise DataError(f"{where} has no {required}.")
    return prompt, max_tokens
