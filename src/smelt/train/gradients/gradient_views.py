"""Gradients of a bucket read where backward left them, without a copy into one flat vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from smelt.train.gradients.layout import BucketLayout

_CHUNK = 1 << 17  # elements that fit into a core's cache beside as many of the residual


class GradientViews:
    """One tensor per slice of the layout, in its order.

    Whether all are finite is checked either by a pass over them or while they are added to the residual. Nothing that
    is not finite is ever sent.
    """

    def __init__(self, layout: BucketLayout, tensors: Sequence[Tensor]) -> None:
        self.layout, self.tensors = layout, tensors
        self._finite: Tensor | None = None  # [] bool, once known

    def all_finite(self) -> Tensor:
        """[] bool"""
        if self._finite is None:
            self._finite = torch.tensor(all(bool(all_finite(tensor)) for tensor in self.tensors))
        return self._finite

    def flatten(self) -> Tensor:
        """Copy into [numel] float32; zeros unless everything is finite."""
        if not self.all_finite():
            return torch.zeros(self.layout.numel)
        return torch.cat([tensor.reshape(-1).float() for tensor in self.tensors])

    def add_to(self, residual: Tensor) -> Tensor:
        """Add to [numel] in place, up to the first chunk that is not finite."""
        if self._finite is None:
            self._finite = torch.tensor(all(map(_add_if_finite, self._views(residual), self.tensors)))
        elif self._finite:
            for view, tensor in zip(self._views(residual), self.tensors, strict=True):
                view.add_(tensor)
        return residual

    def _views(self, residual: Tensor) -> Iterator[Tensor]:
        """The part of each tensor, in its shape."""
        views = zip(self.layout.views(residual), self.tensors, strict=True)
        return (view.view_as(tensor) for (_, view), tensor in views)


BucketGradient = Tensor | GradientViews  # the gradients of one bucket: [numel], or one tensor per parameter


def flatten_gradient(gradient: BucketGradient) -> Tensor:
    """[numel] float32"""
    return gradient.flatten() if isinstance(gradient, GradientViews) else gradient.float()


def all_finite(gradient: BucketGradient) -> Tensor:
    """[] bool. A finite sum has only finite terms, and summing is the fastest check on CPU."""
    if isinstance(gradient, GradientViews):
        return gradient.all_finite()
    if gradient.device.type == "cpu" and gradient.sum().isfinite():
        return torch.tensor(True)
    return torch.linalg.vector_norm(gradient, torch.inf).isfinite()


def _add_if_finite(residual: Tensor, gradient: Tensor) -> bool:
    """Check and add chunk by chunk while the chunk is in cache; return whether everything is finite."""
    if not gradient.is_contiguous():
        return bool(all_finite(gradient)) and residual.add_(gradient) is residual
    for own, chunk in zip(residual.view(-1).split(_CHUNK), gradient.view(-1).split(_CHUNK), strict=True):
        if not all_finite(chunk):
            return False
        own.add_(chunk)
    return True
