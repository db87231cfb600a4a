"""A bucket of gradients: collected tensor by tensor, reduced together, and written back tensor by tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.train.gradients.gradient_views import BucketGradient, GradientViews
from smelt.train.gradients.hierarchy import NodeTopology
from smelt.train.gradients.layout import BucketLayout
from smelt.train.gradients.reducer import DenseMean, MeanGradient, Reducer


class GradientBucket:
    """The gradients of some parameters. With a node topology its reducer holds this rank's shard of the bucket."""

    def __init__(
        self, device: torch.device, layout: BucketLayout, reducer: Reducer, nodes: NodeTopology | None = None
    ) -> None:
        self.layout, self.reducer, self.nodes, self.device = layout, reducer, nodes, device
        numel = reducer.layout.numel * (1 if nodes is None else nodes.intra_node.world_size)  # padded to equal shards
        self._buffer = torch.zeros(numel, device=device)
        self._views = {part.name: view.view(part.shape) for part, view in layout.views(self._buffer)}
        self._starts = {part.name: part.start for part in layout.slices}
        self._uncopied: dict[str, Tensor] = {}  # gradients that are read in place until the bucket is reduced
        self._mean: MeanGradient | None = None  # once reduced
        if device.type != "cpu":
            reducer.output_buffer = torch.empty(reducer.layout.numel + 1, device=device)
        self.received: set[str] = set()  # names of parameters
        self.reduced = False
        self.intra_node_bytes, self.total_intra_node_bytes = 0, 0  # in the last step and in all

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return list(self._starts)

    @property
    def complete(self) -> bool:
        """Whether all gradients have been added and the bucket waits to be reduced."""
        return not self.reduced and len(self.received) == len(self._starts)

    @property
    def flat(self) -> Tensor:
        """[numel]: all gradients added so far, in one vector."""
        return self._copied()[: self.layout.numel]

    def add(self, name: str, gradient: Tensor, *, stable: bool = False) -> None:
        """Add a gradient. `stable`: nothing changes it until the bucket is reduced.

        Stable gradients are not copied on CPU, where a copy costs as much as all the rest. On a GPU one pass over one
        vector is faster than one per tensor.
        """
        if stable and self.device.type == "cpu":
            self._uncopied[name] = gradient
        else:
            self._views[name].copy_(gradient)
        self.received.add(name)

    def gradient(self, scale: Tensor | None) -> BucketGradient:
        """Return the reducer's input: the bucket, or this rank's shard of the node's mean. `scale`: of the loss."""
        if scale is None and self.nodes is None and len(self._uncopied) == len(self._starts):
            return GradientViews(self.layout, [self._uncopied[part.name] for part in self.layout.slices])
        flat = self._copied()
        unscaled = flat if scale is None else flat / scale
        return unscaled if self.nodes is None else self.nodes.reduce_scatter(unscaled)

    def reduce(self, scale: Tensor | None, track_unused: bool) -> None:
        """Replace the bucket by its mean over all ranks."""
        before = 0 if self.nodes is None else self.nodes.intra_node.bytes_received["intra_node"]
        gradient = self.gradient(scale)
        used = None
        if track_unused:
            views = (
                gradient.tensors
                if isinstance(gradient, GradientViews)
                else (view for _, view in self.reducer.layout.views(gradient))
            )
            used = torch.stack([view.count_nonzero() > 0 for view in views])
        mean = self.reducer.mean(gradient, used=used)
        if self.nodes is not None:
            mean = DenseMean(self.nodes.all_gather(mean.to_dense()))
            self.intra_node_bytes = self.nodes.intra_node.bytes_received["intra_node"] - before
            self.total_intra_node_bytes += self.intra_node_bytes
        self._mean = mean if scale is None else mean.scale(scale)
        self._uncopied.clear()
        self.reduced = True

    def write_back(self, name: str, gradient: Tensor) -> None:
        """Overwrite a gradient with its mean over all ranks."""
        assert self.reduced and self._mean is not None
        self._mean.copy_into(self._starts[name], gradient)
        self.received.discard(name)
        if not self.received:
            self.reduced = False

    def reset(self) -> None:
        """Drop all gradients."""
        self.received.clear()
        self._uncopied.clear()
        self.reduced = False

    def _copied(self) -> Tensor:
        """Return all gradients in one vector, padded to equal shards if there are nodes."""
        for name, gradient in self._uncopied.items():
            self._views[name].copy_(gradient)
        self._uncopied.clear()
        return self._buffer
