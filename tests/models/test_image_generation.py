"""The diffusion model: its loss, conditions, guidance and sampling; saved and reloaded; foreign folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.errors import ModelError
from smelt.models.image_diffusion import ImageDiffusionConfig, ImageDiffusionModel
from smelt.models.image_generation import (
    SamplingSettings,
    guided_noise,
    load_generator,
    sample_images,
    to_pixels,
)
from smelt.models.network import empty_network
from tests.tiny import BUILDS


def generator(**changes: object) -> ImageDiffusionModel:
    """Return a tiny diffusion model whose head predicts something."""
    labels = {} if "id2label" in changes else {"num_labels": 4}
    values = {"image_size": 8, **labels, "hidden_sizes": (8, 16), "num_res_blocks": 1, "attention_levels": (1,),
              "num_attention_heads": 2, "diffusion_steps": 40, **changes}  # fmt: skip
    torch.manual_seed(0)
    network = ImageDiffusionModel(ImageDiffusionConfig(**values)).eval()  # type: ignore[arg-type]
    for parameter in network.parameters():
        if not parameter.any():  # blocks start as identities
            torch.nn.init.normal_(parameter, std=0.2)
    return network


def noisy_images(network: ImageDiffusionModel, count: int = 3) -> tuple[Tensor, Tensor]:
    size = network.config.image_size
    return torch.randn(count, network.config.num_channels, size, size), torch.arange(count) * 7


def test_a_new_network_predicts_no_noise_and_so_has_a_loss_of_one() -> None:
    torch.manual_seed(0)
    network = ImageDiffusionModel(ImageDiffusionConfig(image_size=16, hidden_sizes=(8, 8), num_labels=3))
    output = network(torch.randn(64, 3, 16, 16), labels=torch.randint(3, (64,)))
    assert output.loss.item() == pytest.approx(1.0, abs=0.05)
    assert not output.logits.any()


def test_the_loss_is_the_error_of_the_noise_that_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """With known noise and steps, and no dropped class, against the formula."""
    network = generator(label_dropout=0.0)
    images, labels = torch.rand(5, 3, 8, 8) * 2 - 1, torch.tensor([0, 1, 2, 3, 3])
    torch.manual_seed(3)
    loss = network(images, labels=labels).loss
    torch.manual_seed(3)
    steps, noise = torch.randint(40, (5,)), torch.randn_like(images)
    noisy = network.schedule.add_noise(images, noise, steps)
    expected = F.mse_loss(network.predict_noise(noisy, steps, network.class_embedding(labels)), noise)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("dropout", "expected"), [(1.0, 1.0), (0.0, 0.0), (0.3, 0.3)])
def test_classes_are_dropped_as_often_as_configured(
    dropout: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, seen = generator(label_dropout=dropout), []
    embed = network.embed_classes
    monkeypatch.setattr(network, "embed_classes", lambda labels: seen.append(labels) or embed(labels))
    torch.manual_seed(0)
    network(torch.randn(1000, 3, 8, 8), labels=torch.zeros(1000, dtype=torch.long))
    assert (seen[0] == 4).float().mean().item() == pytest.approx(expected, abs=0.05)
    assert set(seen[0].tolist()) <= {0, 4}


def test_conditions_are_embeddings_of_classes_and_the_last_one_is_of_no_class() -> None:
    network = generator()
    table = network.class_embedding.weight
    assert torch.equal(network.embed_classes(torch.tensor([[0, 2], [3, 1]])), table[[0, 2, 3, 1]].view(2, 2, -1))
    assert torch.equal(network.no_class(2), table[[4, 4]])


def test_the_step_and_the_condition_change_the_prediction() -> None:
    network = generator()
    noisy, steps = noisy_images(network)
    first, second = network.embed_classes(torch.tensor([0, 0, 0])), network.embed_classes(torch.tensor([0, 1, 0]))
    with torch.no_grad():
        one, other = (network.predict_noise(noisy, steps, condition) for condition in (first, second))
        later = network.predict_noise(noisy, steps + 1, first)
    assert torch.equal(one[[0, 2]], other[[0, 2]]) and not torch.allclose(one[1], other[1], atol=1e-4)
    assert not torch.allclose(one, later, atol=1e-4)


@pytest.mark.parametrize("guidance", [0.0, 1.0, 3.5])
@pytest.mark.parametrize("classes", [[[1], [2], [3]], [[1, 0], [2, 3], [3, 1]]])
def test_guidance_extrapolates_from_the_prediction_without_a_class(classes: list[list[int]], guidance: float) -> None:
    """To the prediction for a class, or to the mean of those for several: not to that for their mean embedding."""
    network = generator()
    noisy, steps = noisy_images(network)
    conditions = network.embed_classes(torch.tensor(classes))
    with torch.no_grad():
        each = [network.predict_noise(noisy, steps, condition) for condition in conditions.unbind(1)]
        unconditional = network.predict_noise(noisy, steps, network.no_class(3))
        actual = guided_noise(network, noisy, steps, conditions, guidance)
        blurred = network.predict_noise(noisy, steps, conditions.mean(1))
    conditional = sum(each) / len(each)
    expected = (1 - guidance) * unconditional + guidance * conditional
    assert torch.allclose(actual, expected, atol=1e-4)  # guidance multiplies errors of rounding
    assert not torch.allclose(conditional, unconditional, atol=1e-2)
    assert torch.allclose(conditional, blurred, atol=1e-5) == (len(each) == 1)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_sampling_is_the_loop_of_ddim_steps(eta: float) -> None:
    network = generator()
    condition = network.embed_classes(torch.tensor([[0], [3]]))
    settings = SamplingSettings(steps=4, guidance=1.0, eta=eta)
    actual = sample_images(network, condition, seed=5, settings=settings)
    source = torch.Generator().manual_seed(5)
    images = torch.randn(2, 3, 8, 8, generator=source)
    for t, s in ((39, 26), (26, 13), (13, 0), (0, -1)):
        steps, previous = torch.tensor([t, t]), torch.tensor([s, s])
        with torch.no_grad():
            noise = network.predict_noise(images, steps, condition[:, 0])
        predicted = network.schedule.predict_images(images, noise, steps).clamp(-1, 1)
        fresh = torch.randn(2, 3, 8, 8, generator=source) if eta else None
        images = network.schedule.step(predicted, images, steps, previous, eta, fresh)
    assert torch.allclose(actual, images, atol=1e-5) and actual.abs().max() <= 1.0001


def test_more_steps_than_the_schedule_has_are_all_of_them() -> None:
    network = generator(diffusion_steps=6)
    condition = network.embed_classes(torch.tensor([[1]]))
    every = sample_images(network, condition, seed=0, settings=SamplingSettings(steps=6))
    more = sample_images(network, condition, seed=0, settings=SamplingSettings(steps=50))
    assert torch.equal(every, more)


def test_the_noise_depends_on_the_seed_and_not_on_the_condition() -> None:
    network = generator()
    for parameter in network.class_embedding.parameters():
        torch.nn.init.zeros_(parameter)  # the condition has no effect: images differ by their noise alone
    settings = SamplingSettings(steps=3, batch_size=2)
    one, other = (sample_images(network, network.embed_classes(labels)[:, None], seed=1, settings=settings)
                  for labels in (torch.tensor([0, 1, 2]), torch.tensor([3, 3, 0])))  # fmt: skip
    assert torch.equal(one, other) and not torch.allclose(one[0], one[1])
    assert not torch.equal(one, sample_images(network, network.no_class(3)[:, None], seed=2, settings=settings))


def test_images_are_sampled_with_fifty_guided_ddim_steps() -> None:
    assert SamplingSettings() == SamplingSettings(steps=50, guidance=2.0, eta=0.0)


def test_pixels_are_the_images_scaled_to_bytes() -> None:
    images = torch.tensor([[[[-1.0, 1.0, 0.0, -2.0, 3.0]]]])
    assert to_pixels(images).flatten().tolist() == [0, 255, 128, 0, 255]
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_pixels((pixels.float() / 255 - 0.5) / 0.5), pixels)


def test_it_is_saved_and_reloaded(tmp_path: Path) -> None:
    network = generator()
    network.save_pretrained(tmp_path)
    loaded = load_generator(tmp_path)
    noisy, steps = noisy_images(network)
    condition = network.embed_classes(torch.tensor([1, 2, 3]))
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    with torch.no_grad():
        assert torch.equal(
            loaded.predict_noise(noisy, steps, condition), network.predict_noise(noisy, steps, condition)
        )


def test_its_config_alone_says_how_it_is_built() -> None:
    network = empty_network(ImageDiffusionConfig(hidden_sizes=(8,), attention_levels=(), num_attention_heads=1), "here")
    assert type(network) is ImageDiffusionModel


def test_another_model_is_no_generator(tmp_path: Path) -> None:
    BUILDS["resnet"]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a resnet model, not a generator of images"):
        load_generator(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_sizes": (12,)}, "multiples of 8"),
        ({"hidden_sizes": ()}, "multiples of 8"),
        ({"image_size": 9, "hidden_sizes": (8, 8)}, "multiple of 2"),
        ({"noise_schedule": "square"}, "expected cosine or linear"),
        ({"label_dropout": 1.5}, "label_dropout is a fraction"),
        ({"diffusion_steps": 1}, "at least 2"),
    ],
)
def test_impossible_configs_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ImageDiffusionConfig(**values)  # type: ignore[arg-type]
