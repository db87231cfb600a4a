"""The calibration batch size for `batch_size: auto`.

It depends on the size of the network and the total memory of the device, not on what is free at the moment, so that the
same recipe on the same machine gives the same batches, and with them the same bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from smelt.compression.recipe.recipe import Recipe
from smelt.measure.memory import total_memory
from smelt.models.anatomy import Anatomy

MEMORY_DIVISOR = 8  # activations of a batch take at most 1/8 of the memory
MAX_BATCH_SIZE = 64


def resolve_batch_size(recipe: Recipe, anatomy: Anatomy, device: torch.device) -> Recipe:
    """Return the recipe with its calibration batch size resolved."""
    if recipe.data.batch_size is not None:
        return recipe
    gradients = any("gradients" in step.needs for step in recipe.steps)
    batch = fit_batch_size(anatomy, recipe.data.seq_len, gradients=gradients, device=device)
    return replace(recipe, data=replace(recipe.data, batch_size=batch))


def fit_batch_size(anatomy: Anatomy, length: int, *, gradients: bool, device: torch.device) -> int:
    """Return the largest power of two whose activations take at most an eighth of the device's memory."""
    hidden_size = anatomy.hidden_size
    intermediate = [
        round(sum(part.token_fraction * part.output.in_features for part in block.parts)) for block in anatomy.blocks
    ]
    block = 8 * hidden_size + 3 * max(intermediate)
    values = block * (len(anatomy.blocks) if gradients else 1)
    sequences = total_memory(device) // MEMORY_DIVISOR // (4 * values * length)
    return min(MAX_BATCH_SIZE, 1 << max(0, int(sequences).bit_length() - 1))
