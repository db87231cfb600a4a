"""Observe the range of activations, for static scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compression.calibration.observers import AbsMaxObserver
from smelt.progress import NullProgress, Progress
from smelt.runtime.integer.conversion import ActivationRange


@torch.no_grad()
def observe_ranges(
    network: nn.Module,
    modules: Mapping[str, nn.Module],
    batches: Sequence[Mapping[str, Tensor]],
    progress: Progress | None = None,
) -> dict[str, ActivationRange]:
    """Return the largest magnitudes per channel of what each module reads and writes; padding is excluded."""
    device = next(network.parameters()).device
    observers = {path: (AbsMaxObserver(), AbsMaxObserver()) for path in modules}
    mask: Tensor | None = None

    def hook(path: str) -> Any:
        def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            for observer, x in zip(observers[path], (args[0], output), strict=True):
                observer(_unpadded(x, mask))

        return after

    handles = [module.register_forward_hook(hook(path)) for path, module in modules.items()]
    try:
        for batch in (progress or NullProgress()).track(batches, "ranges of activations"):
            inputs = {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}
            mask = inputs.get("attention_mask")
            network(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return {
        path: ActivationRange(inputs.values, outputs.values)
        for path, (inputs, outputs) in observers.items()
        if inputs.values is not None and outputs.values is not None
    }


def _unpadded(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the rows of unpadded tokens [rows, channels]; a tensor without tokens, as in a head, is taken whole."""
    if x.dim() == 3 and mask is not None and mask.shape == x.shape[:2]:
        return x[mask.bool()]
    return x.flatten(0, -2)
