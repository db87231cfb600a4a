"""What is asked: random words of the default text, or prompts from a file, drawn by the seed."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smelt.data.files import read_rows
from smelt.data.text import load_text
from smelt.errors import DataError, RequestError

MOST_LENGTH = 1_000_000


@dataclass(frozen=True)
class Length:
    """So many, or any number between two, each as likely: `128` or `64:256`."""

    low: int
    high: int

    def draw(self, chance: random.Random) -> int:
        return chance.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    @classmethod
    def parse(cls, text: str) -> Length:
        found = re.fullmatch(r"(\d{1,7})(?::(\d{1,7}))?", text.strip())
        low = int(found[1]) if found else 0
        high = int(found[2] or low) if found else 0
        if not 1 <= low <= high <= MOST_LENGTH:
            raise RequestError(f"{text!r:.40} is no length; give a number such as 128, or a range such as 64:256.")
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


def random_prompts(count: int, words: Length, output: Length, seed: int = 0) -> list[Prompt]:
    """Words of the default text, each drawn by itself, so that no two prompts begin alike."""
    chance = random.Random(f"prompts {seed}")
    known = load_text("default").joined.split()
    return [Prompt(" ".join(chance.choices(known, k=words.draw(chance))), output.draw(chance)) for _ in range(count)]


def prompts_from(path: Path, count: int, output: Length, *, chat: bool, seed: int = 0) -> list[Prompt]:
    """Rows with a `prompt`, or with `messages` for a chat; `max_tokens` in a row says how long its answer may be."""
    chance, rows = random.Random(f"prompts {seed}"), read_rows(path)
    all_of_them = [_from_row(row, f"{path} row {number}", chat) for number, row in enumerate(rows, 1)]
    drawn: list[Prompt] = []
    while len(drawn) < count:  # every row once in a random order, then all of them again
        for content, asked in chance.sample(all_of_them, len(all_of_them)):
            drawn.append(Prompt(content, asked or output.draw(chance)))
    return drawn[:count]


def _from_row(row: dict[str, Any], where: str, chat: bool) -> tuple[str | list[dict[str, Any]], int]:
    asked = row.get("max_tokens", 0)
    if type(asked) is not int or not 0 <= asked <= MOST_LENGTH:
        raise DataError(f"{where} has max_tokens {asked!r:.40}, which is no number of tokens.")
    messages = row.get("messages")
    if chat and isinstance(messages, list) and messages and all(isinstance(entry, dict) for entry in messages):
        return messages, asked
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        wanted = "`messages` (a list of objects) or `prompt` (a text)" if chat else "`prompt` (a text)"
        raise DataError(f"{where} has no {wanted}.")
    return prompt, asked
