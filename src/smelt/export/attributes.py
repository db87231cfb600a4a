"""Read the attributes of integer nodes; they come from a file."""

from __future__ import annotations

from smelt.errors import FormatError
from smelt.runtime.integer.graph import Node


def integer(node: Node, name: str, default: int | None = None) -> int:
    """Return an attribute that is one integer."""
    value = node.attributes.get(name, default)
    if not isinstance(value, int):
        raise FormatError(f"the attribute {name!r} of {node} is missing or not an integer.")
    return value


def integers(node: Node, name: str, default: int | None = None, length: int = 1) -> list[int]:
    """Return an attribute that is a list; an integer stands for `length` equal ones."""
    value = node.attributes.get(name, default)
    if value is None:
        raise FormatError(f"the attribute {name!r} of {node} is missing.")
    return [value] * length if isinstance(value, int) else list(value)
