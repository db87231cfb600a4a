"""Low-rank factors beside quantised layers while they are trained, and how they become part of the layers.

Pooled factors see, in place of a layer's inputs, their sums over the groups of its grid. What they add is then the same
for all weights of a group, and moves the group's zero point: value = (code - z) s + BA = (code - (z - BA / s)) s
(Xu et al., 2024, QA-LoRA).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.errors import ModelError
from smelt.kernels.hadamard import hadamard_transform
from smelt.models.quantized import STATIC_SCALE, QuantizedLinear
from smelt.numerics.format import PER_TENSOR, QuantizedTensor, QuantParams
from smelt.numerics.gradient import straight_through
from smelt.numerics.integer import Integer

ALPHA = 16.0  # the factors' product is multiplied by this over the rank


class Adapter(nn.Module):
    """Two thin matrices in float32: A draws the inputs together, B spreads them out; B begins at zero."""

    def __init__(self, layer: QuantizedLinear, rank: int, pooled: bool) -> None:
        super().__init__()
        self.size = (
            layer.scheme.weight.effective_group_size(layer.in_features) if pooled else 1
        )  # inputs that are summed
        inputs = math.ceil(layer.in_features / self.size)
        self.rank = min(rank, inputs, layer.out_features)
        device = layer.packed.device
        self.down = nn.Parameter(torch.zeros(self.rank, inputs, device=device))  # A
        self.up = nn.Parameter(torch.zeros(layer.out_features, self.rank, device=device))  # B
        self.columns, self.pooled = layer.in_features, pooled

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """A Gaussian A; its width is ours: what it gives of inputs of size one has about size one."""
        drawn = torch.randn(self.down.shape, generator=generator) / math.sqrt(self.columns)
        self.down.copy_(drawn)

    @torch.no_grad()
    def approximate(self, error: Tensor) -> None:
        """The best factors for a layer's error W - Q [out, in] (LoftQ's first round; Li et al., 2024)."""
        if self.pooled:  # the mean of each group is the best constant for it
            padded = F.pad(error, (0, -self.columns % self.size)).unflatten(-1, (-1, self.size))
            counts = F.pad(torch.ones(self.columns, device=error.device), (0, -self.columns % self.size))
            error = padded.sum(-1) / counts.unflatten(-1, (-1, self.size)).sum(-1)
        left, values, right = torch.linalg.svd(error.float(), full_matrices=False)
        root = values[: self.rank].sqrt()
        self.up.copy_(left[:, : self.rank] * root * (self.rank / ALPHA))
        self.down.copy_(right[: self.rank] * root[:, None])

    @property
    def scaled_up(self) -> Tensor:
        """B with the scale in it, as it is stored."""
        return self.up * (ALPHA / self.rank)

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        """What the factors add to the layer's output, computed as the stored ones are."""
        if self.pooled:
            x = F.pad(x, (0, -self.columns % self.size)).unflatten(-1, (-1, self.size)).sum(-1)
        return (x @ self.down.T.to(x.dtype)) @ self.scaled_up.T.to(x.dtype)

    @torch.no_grad()
    def stored_beside(self, layer: QuantizedLinear, dtype: torch.dtype) -> QuantizedLinear:
        """The layer with the factors added."""
        layer.add_low_rank_factors(self.down.detach().to(dtype, copy=True), self.scaled_up.to(dtype))
        return layer

    @torch.no_grad()
    def merged_into(self, layer: QuantizedLinear, path: str, dtype: torch.dtype) -> QuantizedLinear:
        """A layer of the same codes whose zero points, in float16, hold the pooled factors."""
        held = layer.packed.unpack()
        assert isinstance(held.format, Integer)
        number_format = replace(held.format, symmetric=False, full_range=False, zero_dtype="float16")
        added = (self.scaled_up @ self.down)[..., None]  # [out, groups, 1]
        zero = number_format.round_zero(held.format.zero_point(held.qparams) - added / held.qparams.scale)
        if not bool(zero.isfinite().all()):
            raise ModelError(f"the zero points of {path} cannot hold its factors; use `merge: false`.")
        scheme = replace(layer.scheme, weight=number_format)
        moved = QuantizedTensor(number_format, held.codes, QuantParams(held.qparams.scale, zero))
        new = QuantizedLinear.from_quantized(moved, scheme, bias=layer.bias, dtype=dtype)
        if scheme.static:
            setattr(new, STATIC_SCALE, getattr(layer, STATIC_SCALE))
        return new


def check_mergeable(layer: QuantizedLinear, path: str) -> None:
    """Only uniform grids with a scale of their own a row have zero points that factors can move."""
    found = layer.scheme.weight
    if type(found) is not Integer or found.group_size == PER_TENSOR:
        raise ModelError(f"{path} is not held in integers with a scale a row or group; `merge: true` needs that.")


@contextmanager
def attached(
    layers: Mapping[str, QuantizedLinear], adapters: Mapping[str, Adapter], dtype: torch.dtype
) -> Iterator[None]:
    """Inside, every layer adds what its adapter gives, gradients pass through it, and its matrix is held in full."""
    for path, layer in layers.items():
        layer.forward = _with_adapter(layer, adapters[path], layer.weight.to(dtype))  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


def _with_adapter(layer: QuantizedLinear, adapter: Adapter, weight: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if layer.scheme.hadamard:
            x = hadamard_transform(x)
        rounded = x if layer.inputs is None else straight_through(x, layer.inputs.fake_quantize(x.detach()))
        return F.linear(rounded, weight, layer.bias) + adapter(rounded if adapter.pooled else x)

    return forward
