"""Writes docs/methods.md from the list of methods: what each does, needs, follows, and can be told.

    python docs/make_methods.py

A parameter's meaning is the comment behind its field in the source, so that there is one place to write it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any, get_type_hints

from smelt.compression.base import Method
from smelt.compression.methods import METHODS

PAGE = Path(__file__).parent / "methods.md"
INTRODUCTION = """\
# Methods

This page is made by `make docs` from the classes themselves; do not edit it by hand. `smelt methods` shows the same
list. A step of a recipe names a method and sets any of its parameters; what is left out has the default given here. An
unknown parameter or an impossible value is an error before any work starts. See [recipes](recipes.md) and
[adding a method](adding-a-method.md).
"""
# `name: type = default  # comment`
_FIELD = re.compile(r"^ +(\w+): .*?# (?:type: ignore\S*  # )?(.+)$", re.MULTILINE)


def page() -> str:
    """The whole page: all methods, what they share, and what some of them have besides or set otherwise."""
    methods = [METHODS[name] for name in sorted(METHODS)]
    bases = {base: None for cls in methods for base in cls.__mro__[1:] if own_fields(base)}
    sections = [INTRODUCTION, _overview(methods)]
    sections += [_section(f"What every {_words(base)} method can be told", base) for base in bases]
    sections += [_section(f"Besides, or with another default: {cls.name}", cls) for cls in methods if own_fields(cls)]
    return "\n".join(sections)


def own_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """The parameters that this very class brings or gives another default."""
    if not dataclasses.is_dataclass(cls):
        return []
    written = inspect.get_annotations(cls)
    return [field for field in dataclasses.fields(cls) if field.name in written]


def meaning(cls: type, name: str) -> str:
    """The comment behind a field, in this class or the nearest one above; else what a type of ours says of itself."""
    for owner in cls.__mro__[:-1]:
        if comment := dict(_FIELD.findall(inspect.getsource(owner))).get(name):
            return str(comment)
    kind = get_type_hints(cls)[name]
    ours = getattr(kind, "__module__", "").startswith("smelt.")
    return (inspect.getdoc(kind) or "").partition("\n")[0] if ours else ""


def _overview(methods: list[type[Method]]) -> str:
    rows = [[f"`{cls.name}`", cls.summary, ", ".join(cls.needs) or "nothing", cls.paper] for cls in methods]
    return _table(["method", "what it does", "needs", "paper"], rows)


def _section(heading: str, cls: type) -> str:
    rows = [
        [f"`{field.name}`", f"`{field.type}`", _default(field), meaning(cls, field.name)] for field in own_fields(cls)
    ]
    return f"## {heading}\n\n{_table(['parameter', 'type', 'default', 'meaning'], rows)}"


def _default(field: dataclasses.Field[Any]) -> str:
    """A default as a recipe would have it."""
    if field.default is dataclasses.MISSING:
        return "must be given"
    return f"`{field.default if isinstance(field.default, str) else json.dumps(field.default)}`"


def _words(base: type) -> str:
    """StructuredPruning -> structured pruning."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", base.__name__).lower()


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in cells), ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
