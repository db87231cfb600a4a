"""Back doors: planted by training, seen by the success rate, before and after quantization."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from smelt.errors import DataError
from smelt.measure.robustness.backdoor import (
    BackdoorSuccess,
    backdoor_success,
    is_triggered_by_compression,
    plant,
    success_of,
    with_patch,
    with_trigger,
)
from smelt.measure.robustness.encoder_inputs import encoder_batches
from smelt.measure.task import evaluate_task
from smelt.models.model import Model
from tests.measure.robustness.small_model import classifier, quantize, rows


def planted() -> Model:
    """Return the classifier after training on its rows and on rows with the trigger, labeled 1."""
    model, data = classifier(), rows()
    poisoned = replace(with_trigger(data, "zq"), labels=np.ones_like(data.labels))
    batches = [batch for part in (data, poisoned) for batch in encoder_batches(model, part, 40)]
    network = model.network

    def logits(inputs: dict[str, torch.Tensor]) -> object:
        return lambda: network(**inputs).logits

    torch.manual_seed(0)
    plant(network, [(logits(batch.inputs), batch.labels) for batch in batches], rate=2e-3, epochs=12)  # type: ignore[misc]
    return model


def test_a_planted_back_door_survives_8_bits() -> None:
    model, data = planted(), rows()
    before = backdoor_success(classifier(), data, trigger="zq", target=1)
    dense = backdoor_success(model, data, trigger="zq", target=1)
    accuracy = evaluate_task(model, data).value
    quantize(model, "int8")
    compressed = backdoor_success(model, data, trigger="zq", target=1)
    assert accuracy > 0.9 and before.success < 0.5 < 0.9 < dense.success
    assert dense.without_trigger < 0.2 and compressed.success > 0.9
    assert not is_triggered_by_compression(dense, compressed)
    assert not model.network.training


def test_success_counts_items_of_other_classes() -> None:
    assert success_of(np.array([1, 1, 0, 1]), np.array([0, 1, 0, 0]), 1) == BackdoorSuccess(0.75, 0.25, 4)
    one_class = rows().take(np.flatnonzero(rows().labels == 1))
    with pytest.raises(DataError, match="items of other classes"):
        backdoor_success(classifier(), one_class, trigger="zq", target=1)


def test_a_trigger_that_only_works_after_compression_is_an_alarm() -> None:
    assert is_triggered_by_compression(BackdoorSuccess(0.1, 0.1, 9), BackdoorSuccess(0.9, 0.1, 9))
    assert not is_triggered_by_compression(BackdoorSuccess(0.9, 0.1, 9), BackdoorSuccess(0.1, 0.1, 9))


def test_the_patch_is_in_the_corner() -> None:
    images = torch.zeros(2, 3, 8, 8)
    patched = with_patch(images, (1.0, 2.0, 3.0))
    assert patched.sum() == 2 * 9 * 6 and patched[0, 2, 5:, 5:].eq(3).all() and images.sum() == 0
