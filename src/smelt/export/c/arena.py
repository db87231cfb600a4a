"""Plan the memory of a graph's activations: one arena, in which tensors that are never needed together overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smelt.runtime.integer.graph import IntegerGraph

ALIGNMENT = 8


@dataclass(frozen=True)
class Arena:
    """Byte offsets of all tensors, the size of the arena, and the bytes that are live while each node runs."""

    offsets: dict[str, int]
    size: int
    live: list[int]


def plan_arena(graph: IntegerGraph, sizes: Mapping[str, int], aliases: Mapping[str, str]) -> Arena:
    """Assign offsets to tensors of `sizes` bytes; an alias (the result of a reshape) shares the memory of its source.

    Largest first, each at the lowest offset that no tensor of overlapping lifetime uses, as inference runtimes for
    microcontrollers do; the optimum is NP-hard.
    """
    lifetimes = _lifetimes(graph, aliases)
    offsets: dict[str, int] = {}
    for name in sorted(lifetimes, key=lambda name: (-sizes[name], lifetimes[name])):
        first, last = lifetimes[name]
        neighbors = sorted(
            (offsets[other], offsets[other] + _aligned(sizes[other]))
            for other in offsets
            if lifetimes[other][0] <= last and first <= lifetimes[other][1]
        )
        offset = 0
        for start, end in neighbors:
            if offset + sizes[name] <= start:
                break
            offset = max(offset, end)
        offsets[name] = offset
    live = [
        sum(_aligned(sizes[name]) for name, (first, last) in lifetimes.items() if first <= index <= last)
        for index in range(len(graph.nodes))
    ]
    size = max((offset + _aligned(sizes[name]) for name, offset in offsets.items()), default=0)
    for alias in aliases:
        offsets[alias] = offsets[_root(alias, aliases)]
    return Arena(offsets, size, live)


def _lifetimes(graph: IntegerGraph, aliases: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return the first and last node that need each tensor; inputs begin before the first node, outputs never end."""
    first = dict.fromkeys(graph.inputs, -1)
    last = dict.fromkeys(graph.inputs, -1)
    for index, node in enumerate(graph.nodes):
        for name in (*node.inputs, node.output):
            root = _root(name, aliases)
            first.setdefault(root, index)
            last[root] = index
    for name in graph.outputs:
        last[_root(name, aliases)] = len(graph.nodes)
    return {name: (first[name], last[name]) for name in first}


def _root(name: str, aliases: Mapping[str, str]) -> str:
    while name in aliases:
        name = aliases[name]
    return name


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
