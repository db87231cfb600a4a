"""The MACs of an encoder that drops tokens, from the tokens that each layer computes on given data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from smelt.measure.cost import Workload, shared_macs, unit_macs
from smelt.measure.logits import eval_mode
from smelt.models.anatomy import Anatomy
from smelt.models.model import Model
from smelt.models.token_pruning import token_pruning_of

Batch = Mapping[str, Tensor]


@torch.inference_mode()
def count_tokens(model: Model, batches: Sequence[Batch]) -> Tensor:
    """Run a model and return the tokens that enter each of its layers and that are left: [sequences, layers + 1]."""
    encoder, layers = token_pruning_of(model.network), len(model.anatomy.blocks)
    counts = []
    with eval_mode(model.network):
        for batch in batches:
            if encoder is None or not encoder.enabled:
                counts.append(text_lengths([batch])[:, None].expand(-1, layers + 1))
                continue
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name != "labels"}
            model.network(**inputs)
            assert encoder.token_counts is not None
            counts.append(encoder.token_counts)
    return torch.cat(counts)


def text_lengths(batches: Sequence[Batch]) -> Tensor:
    """Return the tokens of each sequence without padding: [sequences]."""
    return torch.cat([_mask(batch).sum(1).cpu() for batch in batches])


def token_macs(anatomy: Anatomy, counts: Tensor) -> float:
    """Return the MACs of the blocks for all sequences together.

    `counts` [sequences, layers + 1] are the tokens that enter each layer and that are left at the end. The attention of
    a layer computes what enters it, its feed-forward what enters the next one.
    """
    total = 0.0
    for block in anatomy.blocks:
        for part in block.parts:
            column = counts[:, block.index + (part.kind != "heads")]
            for tokens, sequences in zip(*column.unique(return_counts=True), strict=True):
                workload = Workload(tokens=int(tokens))
                each = part.units * unit_macs(part, workload, anatomy.family.causal) + shared_macs(part, workload)
                total += int(sequences) * each
    return total


def _mask(batch: Batch) -> Tensor:
    return batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["input_ids"])
