"""Find NaN and infinity in tensors, with memory for one small chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

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


@torch.no_grad()
def find_non_finite_layer(network: nn.Module, run: Callable[[], object]) -> str | None:
    """Return the path of the first layer whose output contains NaN or infinity in a run of the network, or None."""
    found: list[str] = []

    def check(path: str, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else [output]
        if not found and not all(is_finite(each) for each in outputs if isinstance(each, Tensor)):
            found.append(path)

    handles = [
        module.register_forward_hook(lambda module, args, output, path=path: check(path, output))
        for path, module in network.named_modules()
        if path
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
