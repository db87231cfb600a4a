"""YAML files that expand, nest or compute without end: one short sentence, long before they do."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from yaml import YAMLError

from smelt.compression.recipe.recipe import Recipe, migrate
from smelt.errors import RecipeError
from smelt.strict_yaml import load_yaml


def nested_aliases() -> str:
    """400 bytes that stand for 9^10 values."""
    lines = ["a: &a [x,x,x,x,x,x,x,x,x]"]
    for previous, name in zip("abcdefghi", "bcdefghij", strict=True):
        lines.append(f"{name}: &{name} [{','.join([f'*{previous}'] * 9)}]")
    return "\n".join(lines)


def nested_merges() -> str:
    lines = ["a: &a {k: 1}"]
    for previous, name in zip("abcdefghi", "bcdefghij", strict=True):
        lines.append(f"{name}: &{name} {{<<: [{','.join([f'*{previous}'] * 9)}]}}")
    return "\n".join(lines)


_BUDGET = "steps: [{{method: magnitude, budget: {}}}]"
BOMBS = {
    "nested aliases": (nested_aliases(), "aliases expand to too much"),
    "merged mappings": (nested_merges(), "aliases expand to too much"),
    "a long string many times": ('a: &a "' + "x" * 500_000 + '"\nb: [' + "*a," * 40_000 + "]", "aliases expand"),
    "many values": ("a: [" + "[]," * 150_000 + "]", "more than 20,000 values"),
    "deep lists": ("a: " + "[" * 300_000, "nested more than 100 deep"),
    "deep mappings": ("{a: " * 100_000, "nested more than 100 deep"),
    "deep keys": ("? " * 100_000, "nested more than 100 deep"),
    "sexagesimal": ("seed: 1" + ":10" * 100_000, "too long"),
    "digits": ("seed: " + "1" * 900_000, "too long"),
    "almost a number": ("seed: " + "1" * 200_000 + "x", "must be an integer"),
    "an alias of itself": ("a: &a [*a]", "contains itself"),
    "a key twice": ("steps: []\nseed: 1\n\nseed: 2\n", "the key 'seed' appears twice, line 4"),
    "a nested key twice": ("steps: [{method: gptq, bits: 4, 'bits': 3}]", "the key 'bits' appears twice, line 1"),
    "a long value": ("seed: " + "x" * 900_000, "seed of the recipe must be an integer"),
    "a long key": ("y" * 900_000 + ": 1", "not valid YAML|no key"),
    "a budget of a long measure": (_BUDGET.format("{" + "x" * 900 + ": 0.5}"), "a budget limits one of"),
    "a budget of a long fraction": (_BUDGET.format("{macs: " + "x" * 9_000 + "}"), "a budget keeps a fraction"),
    "a budget of many measures": (_BUDGET.format("[" + "macs, " * 9_000 + "]"), "a budget is written as one measure"),
    "JSON with a key twice": ('{"steps": [{"method": "gptq"}], "seed": 1, "seed": 2}', "'seed' appears twice"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(tmp_path: Path, name: str) -> None:
    text, words = BOMBS[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    start = time.process_time()  # CPU time of this process: other load does not count
    with pytest.raises(RecipeError, match=words) as caught:
        Recipe.load(path)
    assert time.process_time() - start < 10  # each took minutes, gigabytes or a quadratic number of steps
    assert len(str(caught.value)) < 600 and "\n" not in str(caught.value)


def test_the_alias_bomb_is_refused_within_its_first_lines() -> None:
    start = time.process_time()
    for read in (load_yaml, migrate):
        with pytest.raises(Exception, match="aliases expand to too much"):
            read(nested_aliases())
    assert time.process_time() - start < 0.5


def test_pipes_and_devices(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "device.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "device.yaml"):
        with pytest.raises(RecipeError, match="a folder, pipe or device"):
            Recipe.load(tmp_path / name)


def test_the_limits_are_exact_and_errors_name_the_line() -> None:
    load_yaml("a:\n " + "[" * 99 + "]" * 99)  # the mapping is one level
    with pytest.raises(YAMLError, match=r"nested more than 100 deep, line 2$"):
        load_yaml("a:\n " + "[" * 100 + "]" * 100)
    assert len(load_yaml("[" + "1," * 19_999 + "]")) == 19_999  # the list is one value
    with pytest.raises(YAMLError, match="more than 20,000 values"):
        load_yaml("[" + "1," * 20_000 + "]")


def test_aliases_numbers_and_nesting_within_reason_are_read() -> None:
    text = "base: &b {rate: 3e-4, more: 1_000.5e3}\nother: {<<: *b, rate: 1}\nlist: [*b, *b]\ndeep: [[[[[[[[1]]]]]]]]"
    content = load_yaml(text)
    assert content["other"] == {"rate": 1, "more": 1_000.5e3}
    assert content["list"] == [{"rate": 3e-4, "more": 1_000.5e3}] * 2
    assert content["deep"] == [[[[[[[[1]]]]]]]]
