"""Low-rank adapters of quantized layers: training them, and storing them with or merging them into the layers.

Pooled adapters read a layer's inputs summed over its quantization groups. Their product is then constant within a group
and can be merged into its zero point: value = (code - z) s + BA = (code - (z - BA / s)) s (Xu et al., 2024, QA-LoRA).
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
from smelt.models.quantized import QuantizedLinear
from smelt.numerics.format import PER_TENSOR, QuantizedTensor, QuantParams
from smelt.numerics.gradient import straight_through
from smelt.numerics.integer import Integer

ALPHA = 16.0  # LoRA alpha: the product B A is multiplied by alpha / rank


class Adapter(nn.Module):
    """Low-rank adapter in float32: A is the down-projection, B the up-projection, initialized to zero."""

    def __init__(self, layer: QuantizedLinear, rank: int, pooled: bool) -> None:
        super().__init__()
        self.group_size = (
            layer.scheme.weight.effective_group_size(layer.in_features) if pooled else 1
        )  # inputs that are summed into one
        inputs = math.ceil(layer.in_features / self.group_size)
        self.rank = min(rank, inputs, layer.out_features)
        device = layer.packed.device
        self.down = nn.Parameter(torch.zeros(self.rank, inputs, device=device))  # A
        self.up = nn.Parameter(torch.zeros(layer.out_features, self.rank, device=device))  # B
        self.columns, self.pooled = layer.in_features, pooled

    @torch.no_grad()
    def init_gaussian(self, generator: torch.Generator) -> None:
        """Initialize A with Gaussian values of standard deviation 1/sqrt(in), so that unit inputs give unit outputs."""
        values = torch.randn(self.down.shape, generator=generator) / math.sqrt(self.columns)
        self.down.copy_(values)

    @torch.no_grad()
    def init_from_error(self, error: Tensor) -> None:
        """Initialize A and B from the SVD of a layer's error W - Q [out, in] (LoftQ's first round; Li et al., 2024)."""
        if self.pooled:  # the mean of each group is the best constant for it
            padded = F.pad(error, (0, -self.columns % self.group_size)).unflatten(-1, (-1, self.group_size))
            counts = F.pad(torch.ones(self.columns, device=error.device), (0, -self.columns % self.group_size))
            error = padded.sum(-1) / counts.unflatten(-1, (-1, self.group_size)).sum(-1)
        left, values, right = torch.linalg.svd(error.float(), full_matrices=False)
        root = values[: self.rank].sqrt()
        self.up.copy_(left[:, : self.rank] * root * (self.rank / ALPHA))
        self.down.copy_(right[: self.rank] * root[:, None])

    @property
    def scaled_up(self) -> Tensor:
        """Return B multiplied by alpha / rank, as it is stored."""
        return self.up * (ALPHA / self.rank)

    def forward(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        """Return the adapter's contribution to the layer's output, computed as the stored adapter computes it."""
        if self.pooled:
            x = F.pad(x, (0, -self.columns % self.group_size)).unflatten(-1, (-1, self.group_size)).sum(-1)
        return (x @ self.down.T.to(x.dtype)) @ self.scaled_up.T.to(x.dtype)

    @torch.no_grad()
    def add_to_layer(self, layer: QuantizedLinear, dtype: torch.dtype) -> QuantizedLinear:
        """Add the adapter to the layer and return the layer."""
        layer.add_low_rank_factors(self.down.detach().to(dtype, copy=True), self.scaled_up.to(dtype))
        return layer

    @torch.no_grad()
    def merge_into_layer(self, layer: QuantizedLinear, path: str, dtype: torch.dtype) -> QuantizedLinear:
        """Return a layer with the same codes and the pooled adapter merged into its float16 zero points."""
        matrix = layer.packed.unpack()
        assert isinstance(matrix.format, Integer)
        number_format = replace(matrix.format, symmetric=False, full_range=False, zero_dtype="float16")
        offset = (self.scaled_up @ self.down)[..., None]  # [out, groups, 1]
        zero = number_format.round_zero(matrix.format.zero_point(matrix.qparams) - offset / matrix.qparams.scale)
        if not bool(zero.isfinite().all()):
            raise ModelError(f"the float16 zero points of {path} overflow with its adapter; use `merge: false`.")
        scheme = replace(layer.scheme, weight=number_format)
        merged = QuantizedTensor(number_format, matrix.codes, QuantParams(matrix.qparams.scale, zero))
        new = QuantizedLinear.from_quantized(merged, scheme, bias=layer.bias, dtype=dtype)
        if scheme.static:
            new.set_static_inputs(*layer.static_inputs)
        return new


def check_mergeable(layer: QuantizedLinear, path: str) -> None:
    """Raise ModelError unless the layer has per-row or per-group integer qparams, into which adapters can be merged."""
    number_format = layer.scheme.weight
    if type(number_format) is not Integer or number_format.group_size == PER_TENSOR:
        raise ModelError(f"{path} has no integer weights with per-row or per-group scales; `merge: true` needs them.")


@contextmanager
def attached(
    layers: Mapping[str, QuantizedLinear], adapters: Mapping[str, Adapter], dtype: torch.dtype
) -> Iterator[None]:
    """Run every layer with its adapter and dequantized weights inside the context, so that gradients flow through."""
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
