"""Long prompts followed by a question: a needle in real text, a lookup table, and the text's own continuation. The
question is not part of what is compressed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from common import shared

from smelt.data import load_text

CITIES = ["Oslo", "Lima", "Cairo", "Quito", "Seoul", "Dakar", "Riga", "Porto", "Hanoi", "Turin", "Kyoto", "Izmir"]


@dataclass(frozen=True)
class Question:
    """Token ids: the prompt to compress, the tokens after it, and how many of the last of these are the answer."""

    task: str
    prompt: list[int]
    after: list[int]
    answer: int


def make_questions(tokenizer: Any, task: str, count: int, length: int, seed: int) -> list[Question]:
    make = {"needle": _needle, "lookup": _lookup, "continuation": _continuation}[task]
    text = tokenizer(load_text(shared() / "data/wikitext2/test.txt.gz").joined, verbose=False)["input_ids"]
    return [make(tokenizer, text, length, random.Random(f"{task} {seed} {number}")) for number in range(count)]


def _needle(tokenizer: Any, text: list[int], length: int, rng: random.Random) -> Question:
    city, number = rng.choice(CITIES), rng.randrange(10000, 100000)
    fact = tokenizer(f"\nThe secret number of {city} is {number}.\n")["input_ids"]
    start = rng.randrange(len(text) - length)
    position = rng.randrange(32, length - len(fact) - 64)
    prompt = text[start : start + position] + fact + text[start + position : start + length - len(fact)]
    return _with_question("needle", tokenizer, prompt, f"\nThe secret number of {city} is", f" {number}")


def _lookup(tokenizer: Any, _: list[int], length: int, rng: random.Random) -> Question:
    prompt: list[int] = tokenizer("Codes of all names:\n")["input_ids"]
    pairs: list[tuple[str, int]] = []
    while True:
        name = "".join(rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(3))
        pairs.append((name, rng.randrange(100, 1000)))
        line = tokenizer(f"{name} = {pairs[-1][1]}\n")["input_ids"]
        if len(prompt) + len(line) > length:
            break
        prompt += line
    pairs.pop()
    name, code = rng.choice(pairs)
    return _with_question("lookup", tokenizer, prompt, f"\nThe code again: {name} =", f" {code}")


def _continuation(_: Any, text: list[int], length: int, rng: random.Random) -> Question:
    start = rng.randrange(len(text) - length - 128)
    return Question("continuation", text[start : start + length], text[start + length : start + length + 128], 127)


def _with_question(task: str, tokenizer: Any, prompt: list[int], question: str, answer: str) -> Question:
    before, full = tokenizer(question)["input_ids"], tokenizer(question + answer)["input_ids"]
    return Question(task, prompt, full, len(full) - len(before))
