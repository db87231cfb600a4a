"""Which neurons of each feed-forward the texts of a domain use: mean absolute inputs of the down projection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smelt.compression.calibration.block_inputs import Batch, run_backbone
from smelt.data.hub import is_hub
from smelt.data.text import TextData, load_text
from smelt.models.anatomy import Anatomy, Part


def check_domain(source: str) -> None:
    """Raise, before a model is loaded, if there is no such file."""
    file = source.rpartition(":")[0] or source
    if source != "default" and not is_hub(source) and not Path(source).exists() and not Path(file).exists():
        load_text(source)  # says what a source can be


def read_domain(source: str) -> TextData:
    """Read the text of a domain: a source of text, or FILE:COLUMN of a table."""
    file, _, column = source.rpartition(":")
    if file and not Path(source).exists() and Path(file).is_file():
        return load_text(file, column=column, split="calibration")
    return load_text(source, split="calibration")


@torch.no_grad()
def measure_importance(
    anatomy: Anatomy, data: Sequence[Sequence[Batch]], width: float, track: Callable[[Any], Any]
) -> tuple[list[list[Tensor]], float]:
    """Return mean |h| of each neuron, [neurons] by domain and layer, and the mean Jaccard index of the masks that two
    halves of the data give."""
    parts = feed_forwards(anatomy)
    importance, overlaps = [], []
    for batches in track(data):
        shape = 2, len(parts), max(part.units for part in parts)
        sums = torch.zeros(shape, dtype=torch.float64, device=parts[0].output.device)
        counts = [0, 0]
        for number, batch in enumerate(batches):
            half = number % 2
            counts[half] += batch["input_ids"].numel()

            def add(layer: int, part: Part, hidden: Tensor, half: int = half, sums: Tensor = sums) -> None:
                sums[half, layer, : part.units] += hidden.abs().flatten(0, -2).double().sum(0)

            observe_hidden(anatomy, batch, parts, add)
        on_host = sums.cpu()  # once: each copy waits for the device
        means = [on_host[:, layer, : part.units] for layer, part in enumerate(parts)]
        importance.append([mean.sum(0) / sum(counts) for mean in means])
        if min(counts):
            overlaps += [jaccard(top_mask(mean[0], width), top_mask(mean[1], width)) for mean in means]
    return importance, sum(overlaps) / len(overlaps) if overlaps else math.nan


def jaccard(first: Tensor, second: Tensor) -> float:
    """Return the size of the intersection of two masks relative to their union."""
    return float((first & second).sum() / (first | second).sum())


def top_mask(values: Tensor, width: float) -> Tensor:
    """Mark the largest values, exactly this fraction."""
    mask = torch.zeros(len(values), dtype=torch.bool)
    mask[torch.argsort(values, descending=True, stable=True)[: int(width * len(values))]] = True
    return mask


def observe_hidden(
    anatomy: Anatomy, batch: Batch, parts: Sequence[Part], add: Callable[[int, Part, Tensor], None]
) -> None:
    """Run the network without its head, and pass the input of each down projection on."""
    hooks = [
        part.output.module.register_forward_pre_hook(lambda _, args, layer=layer, part=part: add(layer, part, args[0]))
        for layer, part in enumerate(parts)
    ]
    try:
        run_backbone(anatomy, batch)
    finally:
        for hook in hooks:
            hook.remove()


def feed_forwards(anatomy: Anatomy) -> list[Part]:
    return [part for part in anatomy.parts if part.kind == "ffn_channels"]
