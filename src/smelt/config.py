"""YAML into frozen dataclasses: keys and kinds of values are checked, and a wrong key is told the nearest one."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from smelt.errors import ConfigError

Made = TypeVar("Made")
_LARGEST = 1_000_000  # bytes of a file
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", dict: "a set of keys"}


def read_yaml(path: Path) -> Any:
    """The plain content of a small YAML file."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"{path} is too large to be a configuration.")
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration at {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} cannot be read ({error}).") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none is a ValueError
        raise ConfigError(f"{path} is not valid YAML ({' '.join(str(error).split())[:200]}).") from error


def parse(kind: type[Made], content: Any, where: str) -> Made:
    """A dataclass from a set of keys; `where` names them in errors."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} is a set of keys, not {content!r:.80}.")
    wanted = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in content:
        if key not in names:
            raise ConfigError(f"{where} has no key {key!r:.80}{nearest(key, names)}")
    return kind(**{key: _value(value, wanted[key], key, where) for key, value in content.items()})


def nearest(key: Any, names: list[str]) -> str:
    """The end of a sentence about a name that does not exist."""
    found = get_close_matches(str(key), names, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; it has {', '.join(names)}."


def number(text: Any) -> Any:
    """A number that YAML takes for text, such as 3e-4, as a number; anything else as it is."""
    try:
        return float(text) if isinstance(text, str) else text
    except ValueError:
        return text


def _value(value: Any, wanted: Any, key: str, where: str) -> Any:
    options = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if is_dataclass(option):
            return parse(option, value, f"`{key}` of {where}")  # type: ignore[arg-type]
        plain = get_origin(option) or option
        if plain is float and not isinstance(value, bool) and isinstance(number(value), int | float):
            return float(number(value))
        if isinstance(value, plain) and (plain is bool or not isinstance(value, bool)):
            return value
    words = " or ".join(_WORDS.get(get_origin(option) or option, "nothing") for option in options)
    raise ConfigError(f"{key} of {where} must be {words}, not {value!r:.80}.")
