"""The gradients of some parameters as one vector: they come one by one, are reduced together, and go one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.train.gradients.gradient_views import Given, Pieces
from smelt.train.gradients.hierarchy import Nodes
from smelt.train.gradients.layout import Layout
from smelt.train.gradients.means import Mean, Whole
from smelt.train.gradients.reducer import Reducer


class Vector:
    """Some parameters as one flat vector. Where there are nodes its reducer has a share of it."""

    def __init__(self, device: torch.device, layout: Layout, reducer: Reducer, nodes: Nodes | None = None) -> None:
        self.layout, self.reducer, self.nodes, self.device = layout, reducer, nodes, device
        self._room = torch.zeros(reducer.layout.size * (1 if nodes is None else nodes.inside.size), device=device)
        self._views = {piece.name: view.view(piece.shape) for piece, view in layout.views(self._room)}
        self._starts = {piece.name: piece.start for piece in layout.pieces}
        self._left: dict[str, Tensor] = {}  # gradients that stay where they are until they are reduced
        self._mean: Mean | None = None  # once it is reduced
        if device.type != "cpu":
            reducer.room = torch.empty(reducer.layout.size + 1, device=device)
        self.arrived: set[str] = set()
        self.done = False
        self.inside, self.total_inside = 0, 0  # bytes from workers of the same node, in the last step and in all

    @property
    def names(self) -> list[str]:
        """Of the parameters."""
        return list(self._starts)

    @property
    def complete(self) -> bool:
        return not self.done and len(self.arrived) == len(self._starts)

    @property
    def flat(self) -> Tensor:
        """[elements]: all that has arrived, side by side."""
        return self._side_by_side()[: self.layout.size]

    def put(self, name: str, gradient: Tensor, *, stays: bool = False) -> None:
        """`stays`: it is as it is until it is reduced; on a CPU, where a copy costs as much as all the rest, none is
        made then. On a GPU one pass over one vector is better than one over each tensor."""
        if stays and self.device.type == "cpu":
            self._left[name] = gradient
        else:
            self._views[name].copy_(gradient)
        self.arrived.add(name)

    def given(self, scale: Tensor | None) -> Given:
        """What the reducer is handed: the vector, or this worker's share of the node's mean. `scale`: of the loss."""
        if scale is None and self.nodes is None and len(self._left) == len(self._starts):
            return Pieces(self.layout, [self._left[piece.name] for piece in self.layout.pieces])
        flat = self._side_by_side()
        given = flat if scale is None else flat / scale
        return given if self.nodes is None else self.nodes.reduce(given)

    def reduce(self, scale: Tensor | None, watch_unused: bool) -> None:
        before = 0 if self.nodes is None else self.nodes.inside.arrived["inside"]
        given = self.given(scale)
        used = None
        if watch_unused:
            pieces = given.tensors if isinstance(given, Pieces) else (v for _, v in self.reducer.layout.views(given))
            used = torch.stack([piece.count_nonzero() > 0 for piece in pieces])
        mean = self.reducer.mean(given, used=used)
        if self.nodes is not None:
            mean = Whole(self.nodes.gather(mean.dense()))
            self.inside = self.nodes.inside.arrived["inside"] - before
            self.total_inside += self.inside
        self._mean = mean if scale is None else mean.scaled(scale)
        self._left.clear()
        self.done = True

    def give(self, name: str, gradient: Tensor) -> None:
        """A gradient of any shape becomes its mean over all workers."""
        assert self.done and self._mean is not None
        self._mean.into(self._starts[name], gradient)
        self.arrived.discard(name)
        if not self.arrived:
            self.done = False

    def clear(self) -> None:
        self.arrived.clear()
        self._left.clear()
        self.done = False

    def _side_by_side(self) -> Tensor:
        """What has arrived, with room behind it that nodes need to share it evenly."""
        for name, gradient in self._left.items():
            self._views[name].copy_(gradient)
        self._left.clear()
        return self._room
