"""The gradients of some parameters side by side: filled one by one, reduced together, taken out one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.train.hierarchy import Nodes
from smelt.train.layout import Layout
from smelt.train.reducer import Reducer


class Vector:
    """Some parameters as one flat vector. Where there are nodes its reducer has a share of it."""

    def __init__(self, device: torch.device, layout: Layout, reducer: Reducer, nodes: Nodes | None = None) -> None:
        self.layout, self.reducer, self.nodes = layout, reducer, nodes
        self._room = torch.zeros(reducer.layout.size * (1 if nodes is None else nodes.inside.size), device=device)
        self.flat = self._room[: layout.size]
        self.views = self._shaped(self.flat)
        self._means: dict[str, Tensor] = {}  # once it is reduced
        reducer.room = torch.empty(reducer.layout.size + 1, device=device)
        self.arrived: set[str] = set()
        self.done = False
        self.inside, self.total_inside = 0, 0  # bytes from workers of the same node, in the last step and in all

    @property
    def complete(self) -> bool:
        return not self.done and len(self.arrived) == len(self.views)

    def put(self, name: str, gradient: Tensor) -> None:
        self.views[name].copy_(gradient)
        self.arrived.add(name)

    def given(self, scale: Tensor | None) -> Tensor:
        """What the reducer is handed: the vector, or this worker's share of the node's mean. `scale`: of the loss."""
        given = self._room if scale is None else self._room / scale
        return given if self.nodes is None else self.nodes.reduce(given)

    def reduce(self, scale: Tensor | None, watch_unused: bool) -> None:
        before = 0 if self.nodes is None else self.nodes.inside.arrived["inside"]
        given = self.given(scale)
        used = None
        if watch_unused:
            used = torch.stack([view.count_nonzero() > 0 for _, view in self.reducer.layout.views(given)])
        mean = self.reducer.reduce(given, used=used)
        if self.nodes is not None:
            mean = self.nodes.gather(mean)
            self.inside = self.nodes.inside.arrived["inside"] - before
            self.total_inside += self.inside
        self._means = self._shaped(mean if scale is None else mean * scale)
        self.done = True

    def take(self, name: str) -> Tensor:
        assert self.done
        self.arrived.discard(name)
        if not self.arrived:
            self.done = False
        return self._means[name]

    def clear(self) -> None:
        self.arrived.clear()
        self.done = False

    def _shaped(self, flat: Tensor) -> dict[str, Tensor]:
        """The parts of a flat vector, each in the shape of its parameter."""
        return {piece.name: view.view(piece.shape) for piece, view in self.layout.views(flat[: self.layout.size])}
