"""One reader turns plain data into typed dataclasses, refuses the rest in one sentence, and writes a JSON Schema."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from smelt.config import json_schema, parse, suggest
from smelt.errors import ConfigError, RecipeError
from smelt.strict_yaml import load_yaml, read_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{previous}'] * 8)}]\n"
    for previous, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    enabled: bool = False


@dataclass(frozen=True)
class Base:
    group_size: int = field(default=128, metadata={"renamed_from": ("group",)})


@dataclass(frozen=True)
class Outer(Base):
    name: str = field(metadata={"example": "name: a"}, kw_only=True)
    group_size: int = -1  # another default, the same old key
    inner: Inner = field(default_factory=Inner)
    optional: Inner | None = None
    mode: Literal["fast", "slow"] = field(default="fast", metadata={"renamed_values": {"quick": "fast"}})
    batch: int | None = field(default=4, metadata={"aliases": {"auto": None}})
    names: tuple[str, ...] = ()
    pair: tuple[int, float] = (1, 2.0)
    rates: list[float] = field(default_factory=list)
    extra: dict[str, int] | str | None = None


def read(**content: Any) -> Outer:
    return parse(Outer, {"name": "n", **content}, "the test")


def test_every_type_is_read() -> None:
    outer = read(
        group_size=3, inner={"rate": load_yaml("3e-4"), "enabled": True}, optional={"rate": 1}, mode="slow", batch=None,
        names=["a", "b"], pair=[3, 4], rates=[1, 2], extra={"x": 1},
    )  # fmt: skip
    assert outer == Outer(
        name="n", group_size=3, inner=Inner(3e-4, True), optional=Inner(1.0), mode="slow", batch=None,
        names=("a", "b"), pair=(3, 4.0), rates=[1.0, 2.0], extra={"x": 1},
    )  # fmt: skip
    assert type(outer.pair[1]) is float and type(outer.rates[0]) is float
    assert read(inner=Inner(0.5)).inner == Inner(0.5)
    assert read(batch="auto").batch is None
    assert read(extra="text").extra == "text"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"grup_size": 3}, "the test has no key 'grup_size'; did you mean 'group_size'?"),
        ({"zzz": 3}, "the test has no key 'zzz'; it has group_size, name, inner"),
        ({"inner": {"rat": 1}}, "`inner` of the test has no key 'rat'; did you mean 'rate'?"),
        ({"inner": 3}, "`inner` of the test must be a mapping, not 3"),
        ({"group_size": True}, "group_size of the test must be an integer, not True"),
        ({"group_size": 1.5}, "must be an integer, not 1.5"),
        ({"group_size": "3"}, "must be an integer, not '3'"),
        ({"inner": {"enabled": 1}}, "enabled of `inner` of the test must be true or false, not 1"),
        ({"inner": {"rate": "fast"}}, "must be a number, not 'fast'"),
        ({"inner": {"rate": 10**400}}, "must be a number, not 1000"),
        ({"mode": "medium"}, "mode of the test must be one of fast, slow, not 'medium'"),
        ({"mode": 1}, "must be fast or slow, not 1"),
        ({"batch": "many"}, "must be an integer or null, not 'many'"),
        ({"names": "a"}, "names of the test must be a list, not 'a'"),
        ({"names": [1]}, "must be a string, not 1"),
        ({"pair": [1, 2, 3]}, "must be a list of 2"),
        ({"extra": {"x": "y"}}, "x of the test must be an integer"),
        ({"extra": [1]}, "must be a mapping or a string or null, not [1]"),
    ],
)
def test_invalid_values_raise_one_sentence(content: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**content)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_key_comes_with_an_example() -> None:
    with pytest.raises(RecipeError, match="the test needs `name`, such as `name: a`"):
        parse(Outer, {}, "the test", error=RecipeError)
    with pytest.raises(ConfigError, match="the test must be a mapping, not None"):
        parse(Outer, None, "the test")


def test_old_keys_and_values_still_work_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="`group` in the test is now called `group_size`") as warned:
        assert read(group=7).group_size == 7
    assert "\n" not in str(warned[0].message)
    with pytest.warns(FutureWarning, match="`mode: quick` in the test is now called `mode: fast`"):
        assert read(mode="quick").mode == "fast"
    with pytest.raises(ConfigError, match="both 'group_size' and its old name"):
        read(group_size=3, group=3)


def test_suggestions() -> None:
    assert suggest("sees", ["seed", "steps"]) == "; did you mean 'seed'?"
    assert suggest("x", ["seed", "steps"], "there are") == "; there are seed, steps."
    assert suggest("x", []) == "; it has none."


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' appears twice, line 3"),
        ("x: {a: 1, a: 2}", "the key 'a' appears twice"),
        ("a: &a [&b {c: *a}]", "contains itself"),
        (BOMB, "expand to too much"),
        ("a: 2020-99-99", "not valid YAML"),
        ("[" * 10_000, "not valid YAML"),
    ],
)
def test_yaml_that_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(tmp_path / "a.yaml")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_aliases_and_merges_of_reasonable_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\nsame: *base")
    content = read_yaml(tmp_path / "a.yaml")
    assert content["other"] == {"a": 1, "b": 3} and content["same"] == {"a": 1, "b": 2}


def test_the_schema_describes_what_is_accepted() -> None:
    schema = json_schema(Outer)
    json.dumps(schema)
    properties = schema["properties"]
    assert schema["required"] == ["name"] and schema["additionalProperties"] is False
    assert properties["group_size"] == {"type": "integer", "default": -1}
    assert properties["group"]["deprecated"] and "group_size" in properties["group"]["description"]
    assert properties["inner"]["properties"]["enabled"] == {"type": "boolean", "default": False}
    assert properties["inner"]["default"] == {"rate": 0.1, "enabled": False}
    assert properties["mode"]["anyOf"][0] == {"enum": ["fast", "slow"]}
    assert properties["batch"]["anyOf"][1] == {"enum": ["auto"]}
    assert properties["names"] == {"type": "array", "items": {"type": "string"}, "default": []}
