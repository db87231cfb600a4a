"""Read YAML that somebody else wrote: plain data only, unique keys, and limits that hold while it is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from smelt.errors import ConfigError

_MAX_FILE_BYTES = 1_000_000
_MAX_NODES = 20_000  # of a YAML document, counted again for every alias
_MAX_CHARACTERS = 10 * _MAX_FILE_BYTES  # of its scalars, counted again for every alias
_MAX_DEPTH = 100  # of nested lists and mappings
_MAX_NUMBER_LENGTH = 100  # of a scalar that is not a string: numbers of many digits take quadratic time


def read_yaml(path: Path, noun: str = "configuration", error: type[ConfigError] = ConfigError) -> Any:
    """Return the plain content of a small YAML file; `noun` names the file in errors."""
    try:
        if path.exists() and not path.is_file():
            raise error(f"the {noun} {path} cannot be read: it is a folder, pipe or device.")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise error(f"{path} is larger than {_MAX_FILE_BYTES // 10**6} MB, too large to be a {noun}.")
        return load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"there is no {noun} at {path}.") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"the {noun} {path} cannot be read ({problem}).") from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:  # an impossible date is a ValueError
        raise error(f"{path} is not valid YAML ({_shortened(problem)}).") from problem


def load_yaml(text: str) -> Any:
    """Load plain data from YAML; duplicate keys and alias bombs are errors."""
    loader = StrictLoader(text)  # a SafeLoader: it builds plain data only and never runs code
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class StrictLoader(yaml.SafeLoader):
    """Limits nodes, scalar lengths and depth while composing, so that a bomb costs no more than reading up to it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = self._characters = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # of finished nodes: nodes and characters, aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._nodes, self._characters
        self._depth += 1
        node = super().compose_node(parent, index)
        assert node is not None
        self._depth -= 1
        if not is_alias:
            self._sizes[id(node)] = self._nodes - before[0], self._characters - before[1]
        elif id(node) in self._sizes:
            self._count(*self._sizes[id(node)], node)
        else:
            raise _yaml_error("a node contains itself", node)
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        self._count(1, len(node.value), node)
        if node.tag != "tag:yaml.org,2002:str" and len(node.value) > _MAX_NUMBER_LENGTH:
            raise _yaml_error(f"the value {node.value[:20]}... is too long; quote it if it is text", node)
        return node

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        self._check_depth()
        node: yaml.SequenceNode = super().compose_sequence_node(anchor)
        self._count(1, 0, node)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        self._check_depth()
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        self._count(1, 0, node)
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    raise _yaml_error(f"the key {key.value[:80]!r} appears twice", key)
                keys.add((key.tag, key.value))
        return node

    def _check_depth(self) -> None:
        if self._depth > _MAX_DEPTH:
            line = self.peek_event().start_mark.line + 1
            raise yaml.YAMLError(f"it is nested more than {_MAX_DEPTH} deep, line {line}")

    def _count(self, nodes: int, characters: int, node: yaml.Node) -> None:
        self._nodes += nodes
        self._characters += characters
        if self._nodes > _MAX_NODES or self._characters > _MAX_CHARACTERS:
            raise _yaml_error(f"it has more than {_MAX_NODES:,} values or its aliases expand to too much", node)


# YAML 1.2, which editors follow, reads 3e-4 as a number; PyYAML follows 1.1 and returns text.
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[+-]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][+-]?\d+$"), list("+-.0123456789")
)


def _yaml_error(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.YAMLError(f"{problem}, line {node.start_mark.line + 1}")


def _shortened(problem: Exception) -> str:
    return " ".join(str(problem)[:2000].split())[:200]
