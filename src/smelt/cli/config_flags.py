"""Flags of a command, one for each field of a configuration dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from smelt.errors import ConfigError


def with_config_flags(cls: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, which takes them as `**flags`, the flags of a dataclass: names, types, defaults, ranges, help."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        hints = get_type_hints(cls)
        flags = [_parameter(field, hints[field.name]) for field in fields(cls)]
        vars(command)["__signature__"] = signature.replace(parameters=[*own, *flags])  # where typer reads them
        return command

    return decorate


def flags_given(context: typer.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that stand on the command line, without those that have their default."""
    sources = {name: context.get_parameter_source(name) for name in flags}
    return {name: flags[name] for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    metadata, name = field.metadata, field.name.replace("_", "-")
    choices = _choices(hint)
    option = typer.Option(
        f"--{name}/--no-{name}" if hint is bool else f"--{name}",
        help=metadata["description"].replace("[", "\\["),  # a bracket would be markup
        metavar=metadata.get("metavar"),
        min=metadata.get("minimum"),
        max=metadata.get("maximum"),
        rich_help_panel=metadata.get("panel"),
        callback=_choice_check(name, choices) if choices else None,
    )
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    annotation = Annotated[_flag_type(hint), option]  # type: ignore[valid-type]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag_type(hint: Any) -> Any:
    """Return the type for typer, which before 0.19 knows no Literal."""
    if _choices(hint):
        return str | None
    return list[get_args(hint)[0]] if get_origin(hint) is tuple else hint  # type: ignore[misc]


def _choices(hint: Any) -> tuple[str, ...]:
    options = (hint, *get_args(hint))
    return next((get_args(option) for option in options if get_origin(option) is Literal), ())


def _choice_check(name: str, choices: tuple[str, ...]) -> Callable[[str | None], str | None]:
    def check(value: str | None) -> str | None:
        if value is not None and value not in choices:
            rule = f"choose one of {', '.join(choices)}" if len(choices) > 1 else f"the only choice is {choices[0]}"
            raise ConfigError(f"--{name} {value!r} is unknown; {rule}.")
        return value

    return check
