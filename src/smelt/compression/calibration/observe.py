"""What enters the layers of a block: one pass of the stream through it, each layer's inputs handed to who asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compression.calibration.routes import routed
from smelt.compression.calibration.stream import Stream
from smelt.models.anatomy import Block

Observer = Callable[[Tensor], None]  # of inputs [rows, columns]: real tokens only


class _Seen(Exception):
    """The last layer that is observed was reached; what follows is not needed."""


@torch.no_grad()
def observe(
    stream: Stream, block: Block, observers: Mapping[nn.Module, Observer], *, last: nn.Module | None = None
) -> None:
    """Run every batch through the block, or only to `last`, where that is known to be the last one observed."""
    mask: Tensor | None = None

    def hook(observer: Observer) -> Any:
        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            observer(routes.real(module, args[0].detach(), mask))
            if module is last:
                raise _Seen

        return before

    with routed(block.module) as routes:
        hooks = [module.register_forward_pre_hook(hook(observer)) for module, observer in observers.items()]
        try:
            for batch in range(len(stream)):
                mask = stream.masks[batch]
                with suppress(_Seen):
                    stream.run(block.module, block.index, batch)
        finally:
            for handle in hooks:
                handle.remove()


class SecondMoment:
    """The running mean of x x^T over all rows, times two: the Hessian of a layer's squared error (GPTQ's H)."""

    def __init__(self) -> None:
        self.matrix: Tensor | None = None
        self.rows = 0

    def __call__(self, x: Tensor) -> None:
        if not len(x):
            return
        product = gram(x)
        total = self.rows + len(x)
        if self.matrix is None:
            self.matrix = product.mul_(2 / total)
        else:
            self.matrix.mul_(self.rows / total).add_(product, alpha=2 / total)
        self.rows = total


STRIP = 192  # columns of a product that are computed at once on the CPU


def gram(x: Tensor) -> Tensor:  # [rows, columns] -> [columns, columns]
    """x^T x in float32. Low-precision inputs on a GPU are multiplied as they are: the products are exact there. On the
    CPU strips from the diagonal on are computed, and mirrored. (numpy does as much, but its threads and PyTorch's wait
    for each other at full speed on the same cores: the passes between two products took twice as long.)"""
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
        product[last:, first:last] = product[first:last, last:].T
    return product


class Largest:
    """The largest magnitude of each column."""

    def __init__(self) -> None:
        self.values: Tensor | None = None

    def __call__(self, x: Tensor) -> None:
        if len(x):
            found = x.abs().amax(0).float()
            self.values = found if self.values is None else torch.maximum(self.values, found)


class MeanMagnitude:
    """The mean magnitude of each column."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.rows = 0

    def __call__(self, x: Tensor) -> None:
        if len(x):
            found = x.abs().sum(0, dtype=torch.float64)
            self.total = found if self.total is None else self.total + found
            self.rows += len(x)

    @property
    def values(self) -> Tensor | None:
        return None if self.total is None else (self.total / self.rows).float()
