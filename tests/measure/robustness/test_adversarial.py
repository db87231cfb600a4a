"""FGSM and PGD: inside the ball, the clean accuracy at eps 0, PGD at least as strong, and transfer counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from smelt.errors import ConfigError
from smelt.measure.robustness.adversarial import AttackSettings, RobustAccuracy, fgsm, pgd, robust_accuracy
from smelt.measure.robustness.encoder_inputs import encoder_batches
from smelt.measure.robustness.straight_through import straight_through
from tests.measure.robustness.small_model import classifier, rows
from tests.tiny import BUILDS


def images() -> tuple[Tensor, Tensor]:
    return torch.rand(6, 3, 32, 32), torch.tensor([0, 1, 2, 3, 4, 0])


def test_perturbed_images_stay_in_the_ball_and_in_range() -> None:
    network = BUILDS["resnet"]()
    x, labels = images()
    settings = AttackSettings(8 / 255, steps=5, restarts=2, low=0.0, high=1.0)
    for attack in (fgsm, pgd):
        moved = attack(lambda pixels: network(pixel_values=pixels).logits, x, labels, settings)
        assert (moved - x).abs().max() <= 8 / 255 + 1e-6 and moved.min() >= 0 and moved.max() <= 1
        assert not torch.equal(moved, x)


def test_fgsm_of_a_linear_model_is_optimal() -> None:
    weight = torch.tensor([[1.0, -2.0], [-1.0, 2.0]])
    x = torch.tensor([[0.3, 0.1]])
    moved = fgsm(lambda inputs: inputs @ weight.T, x, torch.tensor([0]), AttackSettings(0.1))
    assert torch.allclose(moved, torch.tensor([[0.2, 0.2]]))


def test_pgd_raises_the_loss_at_least_as_much_as_fgsm() -> None:
    network = BUILDS["resnet"]()
    x, labels = images()

    def logits(pixels: Tensor) -> Tensor:
        return network(pixel_values=pixels).logits

    settings = AttackSettings(8 / 255, steps=20)
    losses = [
        nn.functional.cross_entropy(logits(inputs), labels, reduction="none")
        for inputs in (x, fgsm(logits, x, labels, settings), pgd(logits, x, labels, settings))
    ]
    assert (losses[2] >= losses[0]).all() and losses[2].mean() >= losses[1].mean() > losses[0].mean()


def attacked(eps: float, number_format: str | None, dense: bool = False) -> RobustAccuracy:
    model, other = classifier(number_format), classifier()
    with straight_through(model.network):
        batches = [
            (b.embeddings, b.labels, b.mask, b.logits_of(model), b.logits_of(other) if dense else None)
            for b in encoder_batches(model, rows().take(range(16)), 8)
        ]
        return robust_accuracy(batches, AttackSettings(eps, steps=10))


@pytest.mark.parametrize("number_format", [None, "int8"])
def test_accuracy_under_attack(number_format: str | None) -> None:
    none, some, much = (attacked(eps, number_format, dense=True) for eps in (0.0, 0.01, 0.1))
    assert none.clean == none.fgsm == none.pgd == none.transfer == none.robust > 0.9
    for result in (some, much):
        assert result.transfer is not None
        assert result.fgsm >= result.pgd >= result.robust and result.transfer >= result.robust
        assert result.clean == none.clean and result.items == 16
    assert none.robust >= some.robust >= much.robust and none.robust > much.robust


def test_padding_does_not_move() -> None:
    model = classifier()
    data = rows().take(range(8))
    (batch,) = encoder_batches(model, data, 8)
    assert (batch.mask == 0).any()
    moved = pgd(batch.logits_of(model), batch.embeddings, batch.labels, AttackSettings(0.5, restarts=2), batch.mask)
    change = (moved - batch.embeddings).abs()
    assert (change * (1 - batch.mask)).max() == 0 and change.max() > 0


def test_bad_settings() -> None:
    with pytest.raises(ConfigError, match="eps of 0 or more"):
        AttackSettings(-1.0)
