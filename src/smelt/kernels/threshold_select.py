"""Add a gradient to a residual and select the elements above a threshold, in one pass (threshold sparsifiers).

Contains the reference; the fast kernels leave the same bits in the residual and return the same indices for any
size, empty ranges, thresholds of 0 and infinity, and more matches than the capacity. Selected values stay in the
residual: a rank clears the elements that any rank selected, once all ranks have exchanged their indices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smelt.kernels.dispatch import CPU, GPU, has_triton
from smelt.kernels.dispatch import select_backend as _select_backend

_CHUNK = 1 << 16  # elements; on CPU the temporaries of one chunk stay in the cache


def select_backend(values: Tensor) -> str:
    """Return the backend that selects from such a vector."""
    supported = values.dtype == torch.float32 and values.is_contiguous()
    return _select_backend(
        "threshold selection",
        (
            (GPU, lambda: supported and values.is_cuda and has_triton()),
            (CPU, lambda: supported and values.device.type == "cpu" and _has_library()),
        ),
    )


def add_and_select(
    residual: Tensor, gradient: Tensor, threshold: float, start: int, stop: int, capacity: int | None = None
) -> Tensor:
    """Add the gradient to the residual in place, then return the indices in [start, stop) with |residual| >= threshold.

    residual: [elements] float32; gradient: [elements], any floating dtype. Indices are ascending int64, relative to the
    full vector. With `capacity`, exactly that many are returned: the first matches, padded with the number of elements.
    Without, as many as match, which on GPU requires a synchronization.
    """
    kernel = _kernel(residual)
    if kernel is not None:
        indices: Tensor = kernel.add_and_select(residual, gradient.contiguous(), threshold, start, stop, capacity)
        return indices
    residual.add_(gradient)
    return threshold_select_reference(residual, threshold, start, stop, capacity)


def threshold_select(values: Tensor, threshold: float, start: int, stop: int, capacity: int | None = None) -> Tensor:
    """Return the indices in [start, stop) with |values| >= threshold, as `add_and_select` does without a gradient."""
    kernel = _kernel(values)
    if kernel is not None:
        indices: Tensor = kernel.add_and_select(values, None, threshold, start, stop, capacity)
        return indices
    return threshold_select_reference(values, threshold, start, stop, capacity)


def _kernel(values: Tensor) -> Any:
    """Return the module of the fast kernel; None for the reference."""
    backend = select_backend(values)
    if backend == GPU:
        from smelt.kernels.gpu import threshold_select as gpu

        return gpu
    if backend == CPU:
        from smelt.kernels.cpu import threshold_select as cpu

        return cpu
    return None


def _has_library() -> bool:
    from smelt.kernels.cpu.threshold_select import library

    return library() is not None


def threshold_select_reference(
    values: Tensor, threshold: float, start: int, stop: int, capacity: int | None = None
) -> Tensor:
    """Select with PyTorch operations."""
    if capacity is not None:
        mask = values[start:stop].abs() >= threshold
        return torch.nonzero_static(mask, size=capacity, fill_value=len(values) - start).flatten() + start
    step = _CHUNK if values.device.type == "cpu" else max(stop - start, 1)
    chunks = [
        _nonzero(values[first : min(first + step, stop)].abs() >= threshold).add_(first)
        for first in range(start, stop, step)
    ]
    return torch.cat(chunks) if chunks else torch.empty(0, dtype=torch.int64, device=values.device)


def _nonzero(mask: Tensor) -> Tensor:
    """Return the indices of true elements of [count] bool. On CPU, skip 8-byte words without any first."""
    if mask.device.type != "cpu" or len(mask) % 8:
        return torch.nonzero(mask).flatten()
    words = torch.nonzero(mask.view(torch.int64)).flatten()
    row, column = torch.nonzero(mask.view(-1, 8)[words], as_tuple=True)
    return words[row] * 8 + column
