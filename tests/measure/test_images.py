"""Accuracy on images: of a classifier, by class names, and of CLIP by the most similar text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn.functional import softmax

from smelt.data import LabeledImages
from smelt.errors import DataError, ModelError
from smelt.measure.evaluate import evaluate
from smelt.measure.paired import compare
from smelt.models.image_processor import ImageProcessor
from smelt.models.model import Model
from tests.character_tokenizer import character_tokenizer
from tests.tiny import BUILDS

pytest.importorskip("PIL", reason="pillow is not installed")

PIXELS = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (10, 3, 32, 32)).astype(np.uint8)
LABELS = np.arange(10) % 2
PROCESSOR = ImageProcessor.from_values({"do_resize": False, "image_mean": [0.5], "image_std": [0.25]}, "here")


def pixel_values() -> torch.Tensor:
    return torch.from_numpy(PIXELS).float().div(255).sub(0.5).div(0.25)


def classifier(name: str) -> Model:
    return Model(BUILDS[name](), image_processor=PROCESSOR)


@torch.no_grad()
@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_accuracy_is_that_of_the_logits(name: str) -> None:
    model, data = classifier(name), LabeledImages("images", PIXELS, LABELS)
    predictions = model.network(pixel_values=pixel_values()).logits.argmax(-1).numpy()
    result = evaluate(model, data, batch_size=4)
    assert result.metric == "accuracy" and result.value == pytest.approx((predictions == LABELS).mean())
    assert result.predictions is not None and result.predictions.tolist() == predictions.tolist()
    assert compare(result, result).difference == 0
    assert len(evaluate(model, data, limit=4).items) == 4


def test_class_names_are_matched_with_the_model() -> None:
    model = classifier("vit")
    model.network.config.id2label = {0: "dog", 1: "cat"}
    model.network.config.label2id = {"dog": 0, "cat": 1}
    named = evaluate(model, LabeledImages("images", PIXELS, LABELS, ("Cat", "Dog")))
    assert named.labels is not None and named.labels.tolist() == (1 - LABELS).tolist()


@torch.no_grad()
def test_zero_shot_accuracy_is_that_of_the_logits_per_image() -> None:
    sides = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = character_tokenizer()
    text = {**sides, "vocab_size": len(tokenizer), "max_position_embeddings": 64, "eos_token_id": 0, "pad_token_id": 0}
    vision = {**sides, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    network = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()
    model = Model(network, tokenizer, image_processor=PROCESSOR)
    classes = ("aeroplane", "polar_bear", "zebra")
    labels = np.arange(10) % 3
    result = evaluate(model, LabeledImages("images", PIXELS, labels, classes), batch_size=4)
    prompts = ["a photo of a aeroplane.", "a photo of a polar bear.", "a photo of a zebra."]
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    expected = network(**inputs, pixel_values=pixel_values()).logits_per_image
    assert result.logits is not None
    torch.testing.assert_close(
        softmax(torch.from_numpy(result.logits), -1), softmax(expected, -1), rtol=1e-4, atol=1e-5
    )
    assert result.value == pytest.approx((expected.argmax(-1).numpy() == labels).mean())
    with pytest.raises(DataError, match="needs a tokenizer and class names"):
        evaluate(model, LabeledImages("images", PIXELS, labels))


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    data = LabeledImages("images", PIXELS, LABELS)
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json"):
        evaluate(Model(BUILDS["vit"]()), data)
    with pytest.raises(DataError, match="has no labels"):
        evaluate(classifier("vit"), LabeledImages("images", PIXELS, None))
    with pytest.raises(DataError, match="label 6, but the model has only 5 classes"):
        evaluate(classifier("resnet"), LabeledImages("images", PIXELS, LABELS + 5))
    with pytest.raises(DataError, match="'spearman' does not fit classes"):
        evaluate(classifier("vit"), data, metric="spearman")
    with pytest.raises(DataError, match="holds images, but"):
        evaluate(Model(BUILDS["llama"](), character_tokenizer()), data)
