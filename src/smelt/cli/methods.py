"""`smelt methods`: list the compression methods, or the parameters of one."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from smelt.cli.output import JsonOption, SeedOption, console, table, write_json

NameArgument = Annotated[str | None, typer.Argument(metavar="NAME", help="Show the parameters of this method.")]


def run(name: NameArgument = None, json_file: JsonOption = None, seed: SeedOption = 0) -> None:
    from smelt.compression.method_docs import describe_method
    from smelt.compression.methods import METHODS

    if name is not None:
        description = describe_method(METHODS.named(name))
        _show_parameters(description)
        write_json(json_file, description)
        return
    rows = [describe_method(METHODS[known]) for known in sorted(METHODS)]
    cells = [[row["name"], row["summary"], _needs(row), row["paper"]] for row in rows]
    console.print(table("Methods", ["method", "when to use it", "needs", "paper"], cells))
    console.print("`smelt methods NAME` lists the parameters of one.")
    write_json(json_file, rows)


def _show_parameters(method: dict[str, Any]) -> None:
    console.print(f"{method['name']}: {method['summary']}\nneeds: {_needs(method)}\npaper: {method['paper']}")
    rows = method["parameter_details"]
    cells = [[row["name"], row["type"], _default(row), row["meaning"]] for row in rows]
    console.print(table("Parameters", ["parameter", "type", "default", "meaning"], cells))
    console.print(f"in a recipe: a step with `method: {method['name']}`; on the command line: --set NAME=VALUE")


def _default(parameter: dict[str, Any]) -> str:
    """Write a default as in a recipe."""
    if parameter["required"]:
        return "required"
    value = parameter["default"]
    return value if isinstance(value, str) else json.dumps(value)


def _needs(method: dict[str, Any]) -> str:
    return ", ".join(method["needs"]) or "nothing"
