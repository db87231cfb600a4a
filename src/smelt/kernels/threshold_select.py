"""Add the residual, compare, compact: the one pass over all gradients that a threshold sparsifier makes.

The plain reference, and the choice between it and its fast twins. These leave the same bits in the residual and return
the same indices for any size, an empty range, thresholds of 0 and infinity, and more matches than slots. What is found
stays in the residual: a worker empties it where anybody found something, once all have told each other.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from smelt.kernels.linear import REFERENCE, forced_backend

CPU, GPU = "cpu-compiled", "gpu-triton"
_CHUNK = 1 << 16  # elements; on a CPU the temporaries of one chunk stay in the cache


def select_backend(values: Tensor) -> str:
    """What compacts such a vector: a kernel, or the reference, which `using` can ask for."""
    if forced_backend() == REFERENCE.name or values.dtype != torch.float32 or not values.is_contiguous():
        return REFERENCE.name
    if values.is_cuda and importlib.util.find_spec("triton") is not None:
        return GPU
    if values.device.type == "cpu":
        from smelt.kernels.cpu.threshold_select import library

        return CPU if library() is not None else REFERENCE.name
    return REFERENCE.name


def add_and_select(
    residual: Tensor, gradient: Tensor, threshold: float, start: int, stop: int, capacity: int | None = None
) -> Tensor:
    """residual += gradient, in place and everywhere; then where |residual| >= threshold inside [start, stop).

    residual: [elements] float32; gradient: [elements], of any floating type. The indices come back ascending, int64,
    relative to the whole vector. With `slots` there are exactly as many: the first matches, then the number of elements
    for every slot that is left over. Without, there are as many as match, which on a GPU the host must wait to know.
    """
    kernel = _kernel(residual)
    if kernel is not None:
        found: Tensor = kernel.add_and_select(residual, gradient.contiguous(), threshold, start, stop, capacity)
        return found
    residual.add_(gradient)
    return threshold_select_reference(residual, threshold, start, stop, capacity)


def threshold_select(values: Tensor, threshold: float, start: int, stop: int, capacity: int | None = None) -> Tensor:
    """Where |values| >= threshold inside [start, stop): the second half of the pass, for thresholds known later."""
    kernel = _kernel(values)
    if kernel is not None:
        found: Tensor = kernel.add_and_select(values, None, threshold, start, stop, capacity)
        return found
    return threshold_select_reference(values, threshold, start, stop, capacity)


def _kernel(values: Tensor) -> Any:
    """The room of the fast twin; None: the reference."""
    path = select_backend(values)
    if path == GPU:
        from smelt.kernels.gpu import threshold_select as gpu

        return gpu
    if path == CPU:
        from smelt.kernels.cpu import threshold_select as cpu

        return cpu
    return None


def threshold_select_reference(
    values: Tensor, threshold: float, start: int, stop: int, capacity: int | None = None
) -> Tensor:
    """The same by PyTorch's own operations."""
    if capacity is not None:
        mask = values[start:stop].abs() >= threshold
        return torch.nonzero_static(mask, size=capacity, fill_value=len(values) - start).flatten() + start
    step = _CHUNK if values.device.type == "cpu" else max(stop - start, 1)
    found = [_where(values[at : min(at + step, stop)].abs() >= threshold).add_(at) for at in range(start, stop, step)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=values.device)


def _where(mask: Tensor) -> Tensor:
    """Where [count] bool is true. On a CPU the few words of eight that hold anything are found first."""
    if mask.device.type != "cpu" or len(mask) % 8:
        return torch.nonzero(mask).flatten()
    words = torch.nonzero(mask.view(torch.int64)).flatten()
    row, place = torch.nonzero(mask.view(-1, 8)[words], as_tuple=True)
    return words[row] * 8 + place
