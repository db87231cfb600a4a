"""Add the residual, compare, compact: the one pass over all gradients that a threshold sparsifier makes.

The plain reference. A faster twin must leave the same bits in `residual` and return the same indices for any size,
an empty range, thresholds of 0 and infinity, and more matches than slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements; on a CPU the temporaries of one chunk stay in the cache


def add_and_compact(
    residual: Tensor,
    gradient: Tensor,
    threshold: float,
    start: int,
    stop: int,
    slots: int | None = None,
) -> Tensor:
    """residual += gradient, in place and everywhere; then where |residual| >= threshold inside [start, stop).

    residual, gradient: [elements], float32. The indices come back ascending, int64, relative to the whole vector. With
    `slots` there are exactly as many: the first matches, then the number of elements for every slot that is left
    over. Without, there are as many as match, which on a GPU the host must wait to know.
    """
    residual.add_(gradient)
    return compact(residual, threshold, start, stop, slots)


def compact(values: Tensor, threshold: float, start: int, stop: int, slots: int | None = None) -> Tensor:
    """Where |values| >= threshold inside [start, stop): the second half of the pass, for thresholds known later."""
    if slots is not None:
        return _into_slots(values, threshold, start, stop, slots)
    step = _CHUNK if values.device.type == "cpu" else max(stop - start, 1)
    found = [_where(values[at : min(at + step, stop)].abs() >= threshold).add_(at) for at in range(start, stop, step)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=values.device)


def _into_slots(values: Tensor, threshold: float, start: int, stop: int, slots: int) -> Tensor:
    mask = values[start:stop].abs() >= threshold
    found = torch.nonzero_static(mask, size=slots, fill_value=len(values) - start).flatten()
    return found + start


def _where(mask: Tensor) -> Tensor:
    """Where [count] bool is true. On a CPU the few words of eight that hold anything are found first."""
    if mask.device.type != "cpu" or len(mask) % 8:
        return torch.nonzero(mask).flatten()
    words = torch.nonzero(mask.view(torch.int64)).flatten()
    row, place = torch.nonzero(mask.view(-1, 8)[words], as_tuple=True)
    return words[row] * 8 + place
