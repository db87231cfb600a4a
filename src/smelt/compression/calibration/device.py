"""One block at a time on an accelerator: the rest of a network may be larger than its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def on_device(module: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Inside, the module is there; afterwards it is back where it was. None: it stays."""
    home = next(module.parameters()).device
    if device is None or device == home:
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(home)


def moved(value: Any, device: torch.device) -> Any:
    """A tensor, or whatever holds tensors, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        )
    return value
