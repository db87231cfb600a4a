"""Read plain data into frozen dataclasses, and write their JSON Schema for editors.

One reader for recipes, training and serving settings and registered classes. It follows the resolved type hints, so a
module may or may not postpone its annotations. Field metadata it knows, as `field(default=..., metadata={...})` or
`renamed("old_key", default=...)`:

    renamed_from    tuple of old keys: accepted with a FutureWarning
    renamed_values  mapping of old to new values: accepted with a FutureWarning
    aliases         mapping of further spellings to values, such as {"auto": None}
    example         shown in the error when a required key is missing
    minimum, maximum  range of a number, which must then be finite
    description     of the key, in the JSON Schema

A class with a `from_config(value)` classmethod parses its own value; its `config_schema()` describes it, and its
`config_class(mapping)` returns the dataclass whose fields a mapping sets.
"""

from __future__ import annotations

import dataclasses
import math
import types
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from smelt.errors import ConfigError
from smelt.strict_yaml import StrictLoader

T = TypeVar("T")
_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
    type(None): "null",
}
_SCHEMA_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


# --- plain data to dataclasses ----------------------------------------------------------------------------------------


def parse(cls: type[T], content: Any, where: str, *, noun: str = "key", error: type[ConfigError] = ConfigError) -> T:
    """Build the dataclass `cls` from a mapping.

    `where` names the mapping in errors, `noun` its keys; ConfigErrors are raised as `error`.
    """
    try:
        return _parse(cls, content, where, noun)
    except ConfigError as problem:
        if isinstance(problem, error):
            raise
        raise error(str(problem)) from problem


def renamed(*old_keys: str, default: Any, **metadata: Any) -> Any:
    """Declare a dataclass field that is also read from its old keys, with a warning."""
    return dataclasses.field(default=default, metadata={"renamed_from": old_keys, **metadata})


def suggest(name: Any, options: Sequence[str], otherwise: str = "it has") -> str:
    """End a sentence about an unknown name: with the nearest option, or with all of them."""
    matches = get_close_matches(str(name), options, n=1)
    if matches:
        return f"; did you mean {matches[0]!r}?"
    return f"; {otherwise} {', '.join(options) or 'none'}."


def warn_renamed(old: str, new: str, where: str = "") -> None:
    """Warn, in one line, about an old spelling that still works."""
    suffix = f" in {where}" if where else ""
    warnings.warn(
        f"`{old}`{suffix} is now called `{new}`; the old name will stop working.", FutureWarning, stacklevel=2
    )


def renamed_keys(cls: type) -> dict[str, str]:
    """Map each old key of a dataclass to its new one."""
    return {old: field.name for field in _fields(cls) for old in _metadata(cls, field.name).get("renamed_from", ())}


def _parse(cls: type[T], content: Any, where: str, noun: str = "key") -> T:
    if isinstance(content, cls):
        return content
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} must be a mapping, not {content!r:.80}.")
    known, hints, old_keys = {field.name: field for field in _fields(cls)}, _hints(cls), renamed_keys(cls)
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = old_keys.get(key, key)
        if name not in known:
            raise ConfigError(f"{where} has no {noun} {key!r:.80}{suggest(key, list(known))}")
        if name in values:
            raise ConfigError(f"{where} has both {name!r} and its old name; remove the old one.")
        if name != key:
            warn_renamed(key, name, where)
        values[name] = _field_value(name, value, hints[name], _metadata(cls, name), where)
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            example = _metadata(cls, name).get("example")
            raise ConfigError(f"{where} needs `{name}`" + (f", such as `{example}`." if example else "."))
    return cls(**values)


def _field_value(key: str, value: Any, hint: Any, metadata: Mapping[str, Any], where: str) -> Any:
    aliases, renamed = metadata.get("aliases", {}), metadata.get("renamed_values", {})
    if isinstance(value, str) and value in aliases:
        return aliases[value]
    if isinstance(value, str) and value in renamed:
        warn_renamed(f"{key}: {value}", f"{key}: {renamed[value]}", where)
        value = renamed[value]
    result = _convert(value, hint, key, where)
    _check_range(result, metadata, key, where)
    return result


def _check_range(value: Any, metadata: Mapping[str, Any], key: str, where: str) -> None:
    low, high = metadata.get("minimum"), metadata.get("maximum")
    if (low is None and high is None) or not isinstance(value, int | float):
        return
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if not (low <= value <= high and math.isfinite(value)):
        bounds = [f"at least {low:g}"] * math.isfinite(low) + [f"at most {high:g}"] * math.isfinite(high)
        raise ConfigError(f"{key} of {where} must be {' and '.join(bounds)}, not {value!r:.80}.")


class _Mismatch(Exception):
    """The value is not of this type."""


def _convert(value: Any, hint: Any, key: str, where: str) -> Any:
    """Convert one value to its declared type, or say what it must be."""
    if value is None and type(None) in _options(hint):
        return None
    for option in _options(hint):
        try:
            return _as_type(value, option, key, where)
        except _Mismatch:
            continue
    choices = [choice for option in _options(hint) if get_origin(option) is Literal for choice in get_args(option)]
    if choices and isinstance(value, str):
        names = [str(choice) for choice in choices]
        raise ConfigError(f"{key} of {where} must be one of {', '.join(names)}, not {value!r:.80}.")
    raise ConfigError(f"{key} of {where} must be {_describe(hint)}, not {value!r:.80}.")


def _as_type(value: Any, option: Any, key: str, where: str) -> Any:
    origin = get_origin(option) or option
    if origin is Any:
        return value
    if origin is Literal:
        for choice in get_args(option):
            if type(choice) is type(value) and choice == value:
                return choice
        raise _Mismatch
    if hasattr(origin, "from_config"):
        return value if isinstance(value, origin) else origin.from_config(value)
    if is_dataclass(origin):
        return _parse(origin, value, f"`{key}` of {where}")  # type: ignore[arg-type]
    if origin is float:
        return _as_float(value)
    if origin in (list, tuple):
        return _as_sequence(value, option, origin, key, where)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        arguments = get_args(option)
        return {k: _convert(v, arguments[1], str(k), where) for k, v in value.items()} if arguments else dict(value)
    if isinstance(value, origin) and (origin in (bool, object) or not isinstance(value, bool)):
        return value
    raise _Mismatch


def _as_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Mismatch
    try:
        return float(value)
    except OverflowError:
        raise _Mismatch from None


def _as_sequence(value: Any, option: Any, origin: type, key: str, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise _Mismatch
    arguments = get_args(option)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(arguments) != len(value):
            raise ConfigError(f"{key} of {where} must be a list of {len(arguments)}, not {value!r:.80}.")
        return tuple(_convert(item, hint, key, where) for item, hint in zip(value, arguments, strict=True))
    return origin(_convert(item, arguments[0] if arguments else Any, key, where) for item in value)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _describe(hint: Any) -> str:
    names = []
    for option in _options(hint):
        origin = get_origin(option) or option
        if origin is Literal:
            names += [str(choice) for choice in get_args(option)]
        else:
            names.append(_NAMES.get(origin) or f"a {origin.__name__}")
    return " or ".join(names)


def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _metadata(cls: type, name: str) -> dict[str, Any]:
    """Merge a field's metadata over the base classes: a subclass that changes a default keeps it."""
    bases = [vars(base).get("__dataclass_fields__", {}) for base in reversed(cls.__mro__)]
    return {key: value for known in bases if name in known for key, value in known[name].metadata.items()}


def _fields(cls: type) -> list[Field[Any]]:
    return [field for field in fields(cls) if field.init]


# --- migration --------------------------------------------------------------------------------------------------------


def migrate_text(text: str, cls: type) -> str:
    """Rewrite the renamed keys and values in the YAML text of a dataclass; comments and layout stay."""
    node = yaml.compose(text, StrictLoader)
    changes: dict[tuple[int, int], str] = {}
    if node is not None:
        _collect_renames(node, cls, changes)
    for (start, end), new in sorted(changes.items(), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _collect_renames(node: yaml.Node, hint: Any, changes: dict[tuple[int, int], str]) -> None:
    """Note the span of every old key and value below a node, with what replaces it."""
    for option in _options(hint):
        origin, arguments = get_origin(option) or option, get_args(option)
        if isinstance(node, yaml.SequenceNode) and origin in (list, tuple) and arguments:
            for item in node.value:
                _collect_renames(item, arguments[0], changes)
        elif isinstance(node, yaml.MappingNode) and isinstance(origin, type):
            cls = origin.config_class(_scalars(node)) if hasattr(origin, "config_class") else origin
            if cls is not None and is_dataclass(cls):
                _collect_class_renames(node, cls, changes)


def _collect_class_renames(node: yaml.MappingNode, cls: type, changes: dict[tuple[int, int], str]) -> None:
    hints, old_keys = _hints(cls), renamed_keys(cls)
    for key, value in node.value:
        name = old_keys.get(key.value, key.value)
        if name not in hints:
            continue
        if name != key.value:
            changes[key.start_mark.index, key.end_mark.index] = name
        new_values = _metadata(cls, name).get("renamed_values", {})
        if isinstance(value, yaml.ScalarNode) and value.value in new_values:
            changes[value.start_mark.index, value.end_mark.index] = str(new_values[value.value])
        _collect_renames(value, hints[name], changes)


def _scalars(node: yaml.MappingNode) -> dict[str, str]:
    return {key.value: value.value for key, value in node.value if isinstance(value, yaml.ScalarNode)}


# --- JSON Schema ------------------------------------------------------------------------------------------------------


def json_schema(cls: type) -> dict[str, Any]:
    """Describe the mappings that `parse` accepts for a dataclass, as JSON Schema (2020-12)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": cls.__name__, **object_schema(cls)}


def object_schema(cls: type) -> dict[str, Any]:
    """Describe one dataclass, without the header of a schema file."""
    hints, properties, required = _hints(cls), {}, []
    for field in _fields(cls):
        schema = _value_schema(hints[field.name])
        metadata = _metadata(cls, field.name)
        spellings = [*metadata.get("aliases", {}), *metadata.get("renamed_values", {})]
        if spellings:
            schema = {"anyOf": [schema, {"enum": spellings}]}
        schema |= {key: metadata[key] for key in ("description", "minimum", "maximum") if key in metadata}
        default = plain_default(field)
        properties[field.name] = schema if default is MISSING else {**schema, "default": default}
        if field.default is MISSING and field.default_factory is MISSING:
            required.append(field.name)
        for old in metadata.get("renamed_from", ()):
            properties[old] = {**schema, "deprecated": True, "description": f"renamed to `{field.name}`"}
    return {
        "description": (cls.__doc__ or "").strip().partition("\n")[0],
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _value_schema(hint: Any) -> dict[str, Any]:
    options = _options(hint)
    if len(options) > 1:
        return {"anyOf": [_value_schema(option) for option in options]}
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if hasattr(origin, "config_schema"):
        return dict(origin.config_schema())
    if isinstance(origin, type) and is_dataclass(origin):
        return object_schema(origin)
    if origin in (list, tuple):
        item = arguments[0] if arguments and (origin is list or arguments[-1] is Ellipsis) else Any
        return {"type": "array", "items": _value_schema(item)}
    if origin in (dict, Mapping):
        return {"type": "object", **({"additionalProperties": _value_schema(arguments[1])} if arguments else {})}
    return {"type": _SCHEMA_TYPES[origin]} if origin in _SCHEMA_TYPES else {}


def plain_default(field: Field[Any]) -> Any:
    """Return the default of a field as it is written in a file; MISSING if it has none."""
    default: Any = field.default if field.default_factory is MISSING else field.default_factory()
    if hasattr(default, "to_json"):
        default = default.to_json()
    elif is_dataclass(default) and not isinstance(default, type):
        default = dataclasses.asdict(default)
    if isinstance(default, tuple):
        default = [value.to_json() if hasattr(value, "to_json") else value for value in default]
    plain = default is None or isinstance(default, bool | int | float | str | list | dict)
    return default if plain else MISSING
