"""Describe compression methods and their parameters in plain values, for `smelt methods` and docs/methods.md.

The meaning of a parameter is the comment after its field in the source, so that it is written only once.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, get_type_hints

from smelt.compression.base import Method
from smelt.config import plain_default

# `name: type = default  # comment`
_FIELD = re.compile(r"^ +(\w+): .*?# (?:type: ignore\S*  # )?(.+)$", re.MULTILINE)


def describe_method(cls: type[Method]) -> dict[str, Any]:
    """Return when to use a method, what it needs, its paper and its parameters."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    defaults = {field.name: plain_default(field) for field in fields}
    required = {name for name, default in defaults.items() if default is dataclasses.MISSING}
    defaults |= dict.fromkeys(required)
    details = [
        {
            "name": field.name,
            "type": str(field.type),
            "default": defaults[field.name],
            "required": field.name in required,
            "meaning": parameter_meaning(cls, field.name),
        }
        for field in fields
    ]
    return {
        "name": cls.name,
        "summary": cls.summary,
        "needs": cls.needs,
        "paper": cls.paper,
        "parameters": defaults,
        "parameter_details": details,
    }


def parameter_meaning(cls: type, name: str) -> str:
    """Return the comment of a field in the nearest class, or the summary of its type if the type is from Smelt."""
    for owner in cls.__mro__[:-1]:
        if comment := dict(_FIELD.findall(inspect.getsource(owner))).get(name):
            return str(comment)
    field_type = get_type_hints(cls)[name]
    is_from_smelt = getattr(field_type, "__module__", "").startswith("smelt.")
    return (inspect.getdoc(field_type) or "").partition("\n")[0] if is_from_smelt else ""
