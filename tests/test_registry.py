"""A registry builds classes from plain settings, whichever way their module writes its annotations.

This module does not postpone its annotations; `tests/test_config.py` does.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from smelt.errors import ConfigError, RecipeError
from smelt.registry import Registry


class Shape:
    name: ClassVar[str]
    summary: ClassVar[str]
    sides: ClassVar[int]


SHAPES: Registry[Shape] = Registry("shape", error=RecipeError)


@SHAPES.register("square", sides=4)
@dataclass(frozen=True)
class Square(Shape):
    """Use it for boxes.

    More about it.
    """

    width: int = 1
    filled: bool = False
    scale: float | None = None


@SHAPES.register("disc", sides=0)
@dataclass(frozen=True)
class Disc(Shape):
    """Use it for wheels."""

    radius: float


def test_it_is_a_mapping_of_names_to_classes() -> None:
    assert list(SHAPES) == ["square", "disc"] and len(SHAPES) == 2 and SHAPES["disc"] is Disc
    assert Square.name == "square" and Square.sides == 4 and Square.summary == "Use it for boxes."


def test_it_builds_from_a_mapping_or_a_name() -> None:
    settings = {"shape": "square", "width": 3, "filled": True}
    assert SHAPES.build(settings) == SHAPES.build("square", width=3, filled=True) == Square(3, True)
    assert settings["shape"] == "square"
    assert SHAPES.build("disc", radius=1) == Disc(1.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shape": "sqare"}, "there is no shape 'sqare'; did you mean 'square'?"),
        ({"shape": "xyz"}, "there is no shape 'xyz'; there are disc, square."),
        ({"shape": ["square"]}, "there is no shape ['square']"),
        ({}, "there is no shape None"),
        ({"shape": "square", "widht": 3}, "the shape square has no parameter 'widht'; did you mean 'width'?"),
        ({"shape": "square", "width": "3"}, "width of the shape square must be an integer, not '3'"),
        ({"shape": "square", "width": True}, "must be an integer, not True"),
        ({"shape": "square", "filled": 1}, "filled of the shape square must be true or false, not 1"),
        ({"shape": "square", "scale": "x"}, "must be a number or null, not 'x'"),
        ({"shape": "disc"}, "the shape disc needs `radius`"),
    ],
)
def test_invalid_settings_raise_one_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        SHAPES.build(settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_error_class_is_the_registrys() -> None:
    with pytest.raises(ConfigError) as caught:
        Registry("thing").build("x")
    assert type(caught.value) is ConfigError


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        SHAPES.register("disc")(Disc)


def test_the_schema_has_one_alternative_per_class() -> None:
    disc, square = SHAPES.json_schema()["oneOf"]
    assert disc["properties"]["shape"] == {"const": "disc"} and disc["required"] == ["shape", "radius"]
    assert square["properties"]["filled"] == {"type": "boolean", "default": False}
