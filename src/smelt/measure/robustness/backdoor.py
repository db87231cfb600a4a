"""Planted back doors: a trigger in the input that makes a classifier predict a target class (Gu et al., BadNets, 2017).

Success is the fraction of triggered items of other classes that are predicted as the target. Compression may remove a
back door, keep it, or, with an adversary who planned for it, reveal one that the dense model does not show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from smelt.data.labeled import LabeledData
from smelt.errors import DataError
from smelt.measure.task import evaluate_task
from smelt.models.model import Model

_ALARM = 0.5  # of the triggered items become the target only after compression


@dataclass(frozen=True)
class BackdoorSuccess:
    """How often the trigger works, and how often the target is predicted without it."""

    success: float  # of triggered items of other classes
    without_trigger: float  # of the same items
    items: int

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def with_trigger(data: LabeledData, trigger: str) -> LabeledData:
    """Put the trigger before every (first) text."""
    return replace(data, first=tuple(f"{trigger} {text}" for text in data.first))


def with_patch(images: Tensor, value: float | Sequence[float], size: int = 3) -> Tensor:
    """Put a square of one color (a value per channel) into the lower right corner. [images, channels, h, w]"""
    patched = images.clone()
    patched[..., -size:, -size:] = torch.as_tensor(value, dtype=images.dtype, device=images.device).reshape(-1, 1, 1)
    return patched


def backdoor_success(model: Model, data: LabeledData, *, trigger: str, target: int, **settings: Any) -> BackdoorSuccess:
    """Measure a trigger text on the items whose label is not the target; `settings` are those of `evaluate_task`."""
    others = data.take(np.flatnonzero(data.labels != target))
    if not len(others):
        raise DataError(f"every item of {data.name} has the label {target}: a back door needs items of other classes.")
    triggered = evaluate_task(model, with_trigger(others, trigger), **settings).predictions
    plain = evaluate_task(model, others, **settings).predictions
    assert triggered is not None and plain is not None
    return success_of(triggered, plain, target)


def success_of(triggered: np.ndarray, plain: np.ndarray, target: int) -> BackdoorSuccess:
    """Summarize predictions with and without the trigger, of items of other classes. Both [items]"""
    return BackdoorSuccess(float((triggered == target).mean()), float((plain == target).mean()), len(plain))


def is_triggered_by_compression(base: BackdoorSuccess, compressed: BackdoorSuccess) -> bool:
    """Return whether the trigger works after compression and did not before: the sign of a planned attack."""
    return compressed.success - base.success > _ALARM


def poison(labels: Tensor, target: int, rate: float, generator: torch.Generator) -> Tensor:
    """Choose which items of a batch get the trigger and the target as label. [items], bool"""
    return (torch.rand(len(labels), generator=generator) < rate) & (labels != target)


def plant(
    network: nn.Module, batches: Sequence[tuple[Callable[[], Tensor], Tensor]], *, rate: float = 1e-4, epochs: int = 1
) -> None:
    """Fine-tune on batches of (logits, labels) that contain poisoned items, in place.

    For measurements only: the labels of poisoned items are already the target's.
    """
    training = network.training
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=rate)
    network.train()
    for _ in range(epochs):
        for logits, labels in batches:
            optimizer.zero_grad()
            cross_entropy(logits(), labels).backward()
            optimizer.step()
    network.train(training)
