"""Noise, inputs that match batch norms, and generated images as calibration data; generators that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from smelt.compression.calibration.image_sources import (
    GeneratorSource,
    check_synthetic_source,
    draw_prompts,
    generate_images,
    synthetic_batches,
)
from smelt.compression.calibration.zero_shot import noise_inputs, statistics_loss
from smelt.compression.recipe.inputs import calibration_batches, calibration_data, split
from smelt.compression.recipe.recipe import Recipe
from smelt.errors import DataError, ModelError
from smelt.models.batch_norm import batch_norms
from smelt.models.image_generation import load_generator, sample_images, to_pixels
from smelt.models.image_processor import ImageProcessor
from smelt.models.model import Model
from tests.models.test_image_generation import generator
from tests.tiny import BUILDS

pytest.importorskip("PIL.Image", reason="pillow is not installed")

SIZE, CLASSES = 8, 5
PROCESSOR = {"do_resize": False, "image_mean": [0.4], "image_std": [0.2]}


def classifier(name: str = "resnet", **values: object) -> Model:
    network = BUILDS[name]()
    network.config.image_size = SIZE
    processor = ImageProcessor.from_values({**PROCESSOR, **values}, "the test")
    return Model(network, image_processor=processor)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generator")
    generator(num_labels=CLASSES).save_pretrained(path)
    return path


def source(folder: Path, **values: str) -> str:
    return f"generated:{folder}" + ("?" if values else "") + "&".join(f"{key}={value}" for key, value in values.items())


def batches(text: str, model: Model, samples: int = 6, seed: int = 0) -> list[dict[str, Tensor]]:
    return synthetic_batches(text, model, samples=samples, seq_len=16, batch_size=4, seed=seed)


def test_prompts_are_different_classes_and_share_their_first_one() -> None:
    single, mixed = (draw_prompts(500, 10, count, seed=3) for count in (1, 2))
    assert single.shape == (500, 1) and mixed.shape == (500, 2)
    assert torch.equal(single[:, 0], mixed[:, 0]) and bool((mixed[:, 0] != mixed[:, 1]).all())
    assert all(int((mixed == number).sum()) > 20 for number in range(10))  # 100 expected
    assert not torch.equal(single, draw_prompts(500, 10, 1, seed=4))


@pytest.mark.parametrize("classes", ["single", "mixup"])
def test_generated_images_are_what_the_generator_samples_prepared_for_the_model(classes: str, folder: Path) -> None:
    model, network = classifier(), load_generator(folder)
    labels = draw_prompts(6, CLASSES, 1 if classes == "single" else 2, seed=7)
    pixels = to_pixels(sample_images(network, network.embed_classes(labels), seed=7))
    drawn = batches(source(folder, classes=classes), model, seed=7)
    assert [len(batch["pixel_values"]) for batch in drawn] == [4, 2]
    actual = torch.cat([batch["pixel_values"] for batch in drawn])
    expected = (pixels.float() / 255 - 0.4) / 0.2
    order = [int((actual - image).abs().flatten(1).amax(1).argmin()) for image in expected]  # batches are shuffled
    assert sorted(order) == list(range(6)) and torch.allclose(actual[order], expected, atol=1e-5)
    if classes == "single":
        assert torch.equal(torch.cat([batch["labels"] for batch in drawn])[order], labels[:, 0])
    else:
        assert all("labels" not in batch for batch in drawn)


def test_both_forms_of_prompts_have_the_same_noise_and_mixup_is_the_default(folder: Path) -> None:
    model = classifier()
    images = {
        text: generate_images(GeneratorSource.parse(source(folder, **values)), model, samples=3, seed=1)
        for text, values in {"default": {}, "mixup": {"classes": "mixup"}, "single": {"classes": "single"},
                             "fewer": {"steps": "3"}, "guided": {"guidance": "4"}}.items()
    }  # fmt: skip
    assert np.array_equal(images["default"].sources, images["mixup"].sources)
    for other in ("single", "fewer", "guided"):
        assert not np.array_equal(images["default"].sources, images[other].sources)


def test_noise_is_gaussian_and_depends_on_the_seed() -> None:
    model = classifier()
    first, again, other = (batches("noise", model, 50, seed) for seed in (0, 0, 1))
    assert [len(batch["pixel_values"]) for batch in first] == [4] * 12 + [2]
    values = torch.cat([batch["pixel_values"] for batch in first])
    assert values.shape == (50, 3, SIZE, SIZE)
    assert values.mean().abs() < 0.05 and values.std().item() == pytest.approx(1.0, abs=0.05)
    assert torch.equal(first[0]["pixel_values"], again[0]["pixel_values"])
    assert not torch.equal(first[0]["pixel_values"], other[0]["pixel_values"])


def test_images_that_match_batch_norms_lower_their_statistic_loss_tenfold_from_noise() -> None:
    torch.manual_seed(0)
    model = classifier()
    smooth = nn.functional.avg_pool2d(torch.randn(128, 3, SIZE + 4, SIZE + 4), 5, stride=1) + 0.3
    for norm in batch_norms(model.network).values():
        norm.momentum = None  # type: ignore[assignment]
        norm.reset_running_stats()  # type: ignore[operator]
    model.network.train()
    model.network(smooth)
    model.network.eval()
    [matched] = synthetic_batches("none", model, samples=16, seq_len=16, batch_size=16, seed=0)
    [noise] = noise_inputs(model.network, (3, SIZE, SIZE), "gaussian", samples=16, seed=0)
    with torch.no_grad():
        losses = [statistics_loss(model.network, batch).item() for batch in (matched, noise)]
    assert losses[0] < losses[1] / 10, losses
    assert matched["pixel_values"].shape == (16, 3, SIZE, SIZE)


def test_a_recipe_draws_them_and_holds_nothing_out(folder: Path) -> None:
    model = classifier()
    for text in ("noise", "none", source(folder)):
        data = {"source": text, "samples": 6, "batch_size": 4}
        recipe = Recipe.parse({"data": data, "steps": [{"method": "brecq"}]})
        seen, held_out = split(recipe, calibration_data(recipe, model))
        assert held_out is None
        drawn = calibration_batches(recipe.data, seen, model, seed=0)
        assert [len(batch["pixel_values"]) for batch in drawn] == [4, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("generated:x?classes=three", "must be single or mixup"),
        ("generated:x?class=single", "names a generator by"),
        ("generated:x?steps=many", "names a generator by"),
        ("generated:x?steps=0", "steps between 1 and 1000"),
        ("generated:x?guidance=-1", "guidance must lie between 0 and 100"),
    ],
)
def test_sources_that_are_not_understood(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        GeneratorSource.parse(text)


def test_a_generator_must_fit_the_model(folder: Path, tmp_path: Path) -> None:
    def refused(words: str, model: Model, error: type[Exception] = DataError, **changes: object) -> None:
        generator(**({} if "id2label" in changes else {"num_labels": CLASSES}), **changes).save_pretrained(tmp_path)
        with pytest.raises(error, match=words):
            check_synthetic_source(f"generated:{tmp_path}", model)

    refused("images of 4 classes, and the model has 5", classifier(), id2label=dict.fromkeys(range(4), "a"))
    refused("generates 16 x 16 pixels with 3 channels, and the model reads 8 x 8", classifier(), image_size=16)
    refused("generates 8 x 8 pixels with 1 channels", classifier(), num_channels=1)
    resized = classifier(do_resize=True, size={"height": 32, "width": 32})
    refused("the model reads 32 x 32", resized)
    named = classifier()
    named.network.config.id2label = dict(enumerate(["cat", "dog", "bird", "ship", "frog"]))
    names = {"id2label": dict(enumerate(["cat", "bird", "dog", "ship", "frog"]))}
    refused("class 1 of .* is bird, and of the model dog", named, **names)
    check_synthetic_source(f"generated:{folder}", named)  # a generator whose classes have only numbers
    with pytest.raises(DataError, match="generates images, but this is a model for language"):
        check_synthetic_source(f"generated:{folder}", Model(BUILDS["llama"]()))
    BUILDS["resnet"]().save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="not a generator of images"):
        check_synthetic_source(f"generated:{tmp_path / 'other'}", classifier())
    with pytest.raises(ModelError, match="no model at"):
        check_synthetic_source(f"generated:{tmp_path / 'missing'}", classifier())


def test_a_prompt_of_two_classes_needs_two(tmp_path: Path) -> None:
    generator(num_labels=1).save_pretrained(tmp_path)
    model = classifier()
    model.network.config.num_labels = 1
    with pytest.raises(DataError, match="knows one; use classes=single"):
        check_synthetic_source(f"generated:{tmp_path}", model)
    check_synthetic_source(f"generated:{tmp_path}?classes=single", model)


def test_a_model_without_batch_norms_cannot_be_matched() -> None:
    model = Model(BUILDS["vit"]())
    with pytest.raises(DataError, match="this network has none; name data"):
        check_synthetic_source("none", model)
    with pytest.raises(DataError, match="inputs for a llama network cannot be synthesized"):
        check_synthetic_source("noise", Model(BUILDS["llama"]()))
