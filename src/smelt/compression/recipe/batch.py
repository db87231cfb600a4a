"""How many sequences are calibrated on at once, where the recipe leaves it open.

It follows from the size of the network and the memory the device has in all, and not from what is free at the moment,
so that the same recipe on the same machine gives the same batches, and with them the same bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from smelt.compression.recipe.recipe import Recipe
from smelt.measure.memory import total_memory
from smelt.models.anatomy import Anatomy

SHARE = 8  # of the memory, one part is for the activations of a batch
LARGEST = 64


def with_batch(recipe: Recipe, anatomy: Anatomy, device: torch.device) -> Recipe:
    """The recipe with the number of sequences settled."""
    if recipe.data.batch_size is not None:
        return recipe
    gradients = any("gradients" in step.needs for step in recipe.steps)
    batch = fitting_batch(anatomy, recipe.data.seq_len, gradients=gradients, device=device)
    return replace(recipe, data=replace(recipe.data, batch_size=batch))


def fitting_batch(anatomy: Anatomy, length: int, *, gradients: bool, device: torch.device) -> int:
    """The largest power of two whose activations take at most an eighth of the device's memory."""
    width = anatomy.parts[0].output.out_features
    wide = [
        round(sum(part.token_fraction * part.output.in_features for part in block.parts)) for block in anatomy.blocks
    ]
    block = 8 * width + 3 * max(wide)
    values = block * (len(anatomy.blocks) if gradients else 1)
    sequences = total_memory(device) // SHARE // (4 * values * length)
    return min(LARGEST, 1 << max(0, int(sequences).bit_length() - 1))
