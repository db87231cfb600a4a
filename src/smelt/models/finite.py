"""Find NaN and infinity in tensors, with memory for one small chunk."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 2**22


def find_non_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that contains NaN or infinity, or None."""
    return next((name for name, tensor in tensors if not is_finite(tensor)), None)


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor of any dtype is free of NaN and infinity."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().reshape(-1)
    for chunk in flat.split(_CHUNK):
        values = chunk.float() if chunk.element_size() == 1 else chunk  # most operations lack 8-bit floats
        low, high = torch.aminmax(values)  # both are NaN if any value is
        if not bool(low.isfinite() & high.isfinite()):
            return False
    return True
