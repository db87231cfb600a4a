"""Batches of text classifiers as continuous inputs: the embeddings of the tokens, which attacks may change."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smelt.data.batches import Batch, labeled_batches
from smelt.data.labeled import LabeledData
from smelt.errors import DataError
from smelt.measure.robustness.adversarial import Logits
from smelt.measure.task import model_labels
from smelt.models.model import Model

_MAX_LENGTH = 128


@dataclass(frozen=True, eq=False)
class EncoderBatch:
    """A batch of texts: token ids and mask, their embeddings [rows, tokens, width], labels, and what may change."""

    inputs: Batch
    embeddings: Tensor
    labels: Tensor
    mask: Tensor  # [rows, tokens, 1]: 1 for tokens, 0 for padding

    def logits_of(self, model: Model) -> Logits:
        """Return the logits of a model as a function of the embeddings."""
        others = {name: tensor for name, tensor in self.inputs.items() if name != "input_ids"}
        return lambda embeddings: model.network(inputs_embeds=embeddings, **others).logits


def encoder_batches(model: Model, data: LabeledData, batch_size: int) -> list[EncoderBatch]:
    """Tokenize and embed all items, in order."""
    if model.tokenizer is None:
        raise DataError(f"{model.source or 'This model'} has no tokenizer: it cannot be attacked through text.")
    batches = labeled_batches(
        replace(data, labels=model_labels(model, data)),
        model.tokenizer,
        samples=None,
        max_length=_MAX_LENGTH,
        batch_size=batch_size,
        seed=0,
        shuffle=False,
    )
    return [_embedded(model, batch) for batch in batches]


@torch.no_grad()
def _embedded(model: Model, batch: Batch) -> EncoderBatch:
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name != "labels"}
    embeddings: Tensor = model.network.get_input_embeddings()(inputs["input_ids"])
    mask = inputs["attention_mask"][:, :, None].to(embeddings.dtype)
    return EncoderBatch(inputs, embeddings, batch["labels"].to(model.device), mask)
