"""Unit masks: one variable per unit, multiplied into the input of the projection that reads the unit.

Masks serve to compute gradients or to try a selection; surgery then removes units physically.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from smelt.models.anatomy import Anatomy, Part


def unit_masks(anatomy: Anatomy, *, requires_grad: bool = False) -> list[Tensor]:
    """Return one mask of ones per part, in float32 on the part's device."""
    return [torch.ones(part.units, device=part.output.device, requires_grad=requires_grad) for part in anatomy.parts]


@contextmanager
def masked(anatomy: Anatomy, masks: Sequence[Tensor]) -> Iterator[None]:
    """Apply these masks, one per part, inside the context."""
    hooks = [
        part.output.module.register_forward_pre_hook(_multiply(part, mask))
        for part, mask in zip(anatomy.parts, masks, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def apply_mask(part: Part, mask: Tensor, activations: Tensor) -> Tensor:
    """Scale each unit's slice of the input of the part's output projection."""
    factor = mask.to(activations.dtype)
    if part.columns_per_unit > 1:
        factor = factor.repeat_interleave(part.columns_per_unit)
    if part.kind == "channels":  # [batch, channels, height, width]
        factor = factor.view(1, -1, 1, 1)
    return activations * factor


def _multiply(part: Part, mask: Tensor) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (apply_mask(part, mask, args[0]), *args[1:])

    return hook
