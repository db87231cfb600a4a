"""Chosen bit flips: the loss never falls, few of them do what many random ones do not, and all are undone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smelt.errors import ModelError
from smelt.measure.robustness.bit_flips import distinct_positions, flipped_bits
from smelt.measure.robustness.bit_search import BitSearchResult, classification_loss, progressive_bit_search
from smelt.measure.robustness.encoder_inputs import encoder_batches
from smelt.measure.robustness.storage import select, stored_tensors
from smelt.measure.robustness.straight_through import straight_through
from smelt.models.model import Model
from tests.measure.robustness.small_model import classifier, rows
from tests.measure.robustness.test_storage import contents


def search(model: Model, **settings: int) -> BitSearchResult:
    batch = encoder_batches(model, rows().take(range(32)), 32)[0]
    loss = classification_loss(lambda: model.network(**batch.inputs).logits, batch.labels)
    return progressive_bit_search(model.network, loss, classes=2, **settings)


@pytest.mark.parametrize("number_format", ["int8", "int4-asym/8"])
def test_the_loss_never_falls_and_everything_is_restored(number_format: str) -> None:
    model = classifier(number_format)
    before = contents(model.network)
    result = search(model, max_steps=4)
    losses = [result.loss, *(step.loss for step in result.steps)]
    assert losses == sorted(losses) and len(losses) > 1 and losses[-1] > losses[0]
    assert contents(model.network) == before
    assert result.flips == sum(step.flips for step in result.steps) >= len(result.steps)


def test_chosen_flips_hurt_more_than_as_many_random_ones() -> None:
    model = classifier("int8")
    result = search(model, max_steps=6)
    codes = select(stored_tensors(model.network), parts=["codes"])
    batch = encoder_batches(model, rows().take(range(32)), 32)[0]
    loss = classification_loss(lambda: model.network(**batch.inputs).logits, batch.labels)
    assert result.bits == sum(entry.num_bits for entry in codes)
    for seed in range(3):
        positions = distinct_positions(result.bits, result.flips, np.random.default_rng(seed))
        with flipped_bits(codes, positions), torch.no_grad():
            assert float(loss()[0]) < result.steps[-1].loss
    assert result.steps[-1].loss > 3 * result.loss


def test_fewer_layers_are_tried_on_request() -> None:
    """The layer with the largest predicted gain is among those tried."""
    everywhere, one = search(classifier("int8"), max_steps=1), search(classifier("int8"), max_steps=1, max_layers=1)
    assert one.loss < one.steps[0].loss <= everywhere.steps[0].loss


def test_a_float_model_has_no_codes() -> None:
    with pytest.raises(ModelError, match="integer formats; this model has none"):
        search(classifier(), max_steps=1)


def test_gradients_pass_straight_through_rounded_activations() -> None:
    model = classifier("int8", inputs="int8")
    batch = encoder_batches(model, rows().take(range(4)), 4)[0]
    with torch.no_grad():
        expected = model.network(**batch.inputs).logits
    x = batch.embeddings.clone().requires_grad_(True)
    with straight_through(model.network, weight_gradients=True) as weights:
        logits = batch.logits_of(model)(x)
        logits.sum().backward()
    assert torch.allclose(logits, expected, atol=1e-3)
    assert x.grad is not None and x.grad.abs().max() > 0
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in weights.values())
    assert all(layer.round_inputs is None for layer in model.network.modules() if hasattr(layer, "round_inputs"))
