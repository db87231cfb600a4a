"""Observers of layer inputs, and the pass over the calibration data that feeds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compression.calibration.block_inputs import BlockInputs, StopForward
from smelt.compression.calibration.expert_routing import track_routing
from smelt.kernels.conv import ConvShape
from smelt.models.anatomy import Block
from smelt.models.quantized_network import conv_shape

# Called with inputs [rows, columns] of unpadded tokens; with [rows, groups, columns] for a convolution with groups.
Observer = Callable[[Tensor], None]


@torch.no_grad()
def observe(
    block_inputs: BlockInputs,
    block: Block,
    observers: Mapping[nn.Module, Observer],
    *,
    stop_at: nn.Module | None = None,
) -> None:
    """Run every batch through the block and pass layer inputs to their observers; stop at the module `stop_at`."""
    mask: Tensor | None = None

    def hook(observer: Observer) -> Any:
        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach()
            shape = conv_shape(module)
            observer(_unfolded_rows(x, shape) if shape is not None else routing.unpadded_rows(module, x, mask))
            if module is stop_at:
                raise StopForward

        return before

    with track_routing(block.module) as routing:
        hooks = [module.register_forward_pre_hook(hook(observer)) for module, observer in observers.items()]
        try:
            for batch in range(len(block_inputs)):
                mask = block_inputs.masks[batch]
                with suppress(StopForward):
                    block_inputs.run(block.module, block.index, batch)
        finally:
            for handle in hooks:
                handle.remove()


def _unfolded_rows(x: Tensor, shape: ConvShape) -> Tensor:
    """Return the inputs of every output position of a convolution: [rows, columns], or [rows, groups, columns]."""
    rows = shape.unfold(shape.images(x))
    return rows[:, 0] if shape.groups == 1 else rows


class HessianObserver:
    """Accumulate 2 E[x x^T] over all rows: the Hessian of a layer's squared error, as in GPTQ.

    A convolution with groups has one for each, [groups, columns, columns].
    """

    def __init__(self) -> None:
        self.matrix: Tensor | None = None
        self.rows = 0

    def __call__(self, x: Tensor) -> None:
        if not len(x):
            return
        product = gram(x) if x.dim() == 2 else torch.einsum("rgi,rgj->gij", x.float(), x.float())
        total = self.rows + len(x)
        if self.matrix is None:
            self.matrix = product.mul_(2 / total)
        else:
            self.matrix.mul_(self.rows / total).add_(product, alpha=2 / total)
        self.rows = total


STRIP = 192  # columns of a product computed at once on CPU


def gram(x: Tensor) -> Tensor:  # [rows, columns] -> [columns, columns]
    """Compute x^T x in float32.

    On GPU, low-precision inputs are multiplied directly: their products are exact. On CPU, only strips right of the
    diagonal are computed, and mirrored. (numpy does the same, but its spinning threads compete with PyTorch's for the
    cores: the passes between two products took twice as long.)
    """
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x.T, x, out_dtype=torch.float32)
    x = x.float()
    if x.is_cuda:
        return x.T @ x
    columns = x.shape[1]
    product = torch.empty(columns, columns)
    for first in range(0, columns, STRIP):
        last = min(first + STRIP, columns)
        product[first:last, first:] = x[:, first:last].T @ x[:, first:]
        square = product[first:last, first:last]  # whose halves can differ in the last bit
        square.copy_(square.triu() + square.triu(1).T)
        product[last:, first:last] = product[first:last, last:].T
    return product


class AbsMaxObserver:
    """Track the largest magnitude of each column."""

    def __init__(self) -> None:
        self.values: Tensor | None = None

    def __call__(self, x: Tensor) -> None:
        if len(x):
            amax = x.abs().amax(0).float()
            self.values = amax if self.values is None else torch.maximum(self.values, amax)


class MeanAbsObserver:
    """Track the mean magnitude of each column."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.rows = 0

    def __call__(self, x: Tensor) -> None:
        if len(x):
            total = x.abs().sum(0, dtype=torch.float64)
            self.total = total if self.total is None else self.total + total
            self.rows += len(x)

    @property
    def values(self) -> Tensor | None:
        return None if self.total is None else (self.total / self.rows).float()


class HistogramObserver:
    """Count magnitudes in bins of equal width, so that percentiles of any number of values can be read.

    The width of the bins doubles whenever a larger value appears, which merges them in pairs and loses no count.
    """

    def __init__(self, bins: int = 8192) -> None:
        self.counts = torch.zeros(bins, dtype=torch.int64)
        self.limit = 0.0  # upper edge of the last bin
        self.minimum, self.maximum = float("inf"), float("-inf")

    def __call__(self, x: Tensor) -> None:
        if not x.numel():
            return
        low, high = (float(value) for value in torch.aminmax(x.detach().float()))
        self.minimum, self.maximum = min(self.minimum, low), max(self.maximum, high)
        amax = max(abs(low), abs(high))
        if not self.limit:
            self.limit = amax
        while amax > self.limit > 0:
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts = torch.cat([pairs, torch.zeros_like(pairs)])
            self.limit *= 2
        indices = x.detach().float().abs().flatten() * (len(self.counts) / (self.limit or 1.0))
        indices = indices.long().clamp(max=len(self.counts) - 1).cpu()
        self.counts += torch.bincount(indices, minlength=len(self.counts))

    def percentile(self, percent: float) -> float:
        """Return the smallest edge of a bin below which this share of the magnitudes lies; 100: the largest one."""
        if percent >= 100:
            return max(abs(self.minimum), abs(self.maximum)) if self.counts.any() else 0.0
        wanted = percent / 100 * int(self.counts.sum())
        edge = int((self.counts.cumsum(0) < wanted).sum()) + 1
        return min(edge * self.limit / len(self.counts), max(abs(self.minimum), abs(self.maximum)))
