"""Images are prepared as transformers prepares them, and untrusted settings are bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from smelt.errors import ModelError
from smelt.models.image_processor import FILE, ImageProcessor

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

NORMALIZED = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessor", {"size": {"height": 24, "width": 32}, **NORMALIZED}),
    "clip": (
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True, **NORMALIZED},
    ),
    "convnext": ("ConvNextImageProcessor", {"size": {"shortest_edge": 48}, "crop_pct": 0.875, **NORMALIZED}),
    "convnext large": ("ConvNextImageProcessor", {"size": {"shortest_edge": 384}, **NORMALIZED}),
    "no resize": ("ViTImageProcessor", {"do_resize": False, "resample": 3, **NORMALIZED}),
}


def image(height: int, width: int) -> Any:
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([rows * 3 % 256, columns * 5 % 256, rows * columns % 256], -1).astype(np.uint8))


@pytest.mark.parametrize("name", CASES)
def test_the_same_pixels_as_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, values = CASES[name]
    reference = getattr(transformers, f"{kind}Pil", None)
    if reference is None:
        pytest.skip("this transformers has no processor without torchvision")
    ours = ImageProcessor.from_values({"image_processor_type": kind, **values}, "here")
    for size in ((50, 70), (71, 45)):
        default = {"resample": 2} if "resample" not in values else {}
        expected = reference(**{**default, **values})(images=[image(*size)], return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(ours([image(*size)], 3), expected, rtol=1e-5, atol=1e-5)


def test_gray_images_and_gray_models() -> None:
    processor = ImageProcessor.from_values({"do_resize": False, "image_mean": [0.5], "image_std": [0.5]}, "here")
    gray = Image.fromarray(np.full((4, 4), 255, np.uint8))
    assert processor([gray], 1).shape == (1, 1, 4, 4) and processor([gray], 3).shape == (1, 3, 4, 4)
    assert float(processor([gray], 1).max()) == 1.0


def test_it_is_saved_and_read_again(tmp_path: Path) -> None:
    processor = ImageProcessor.from_values({"image_processor_type": "ViTImageProcessor", **CASES["vit"][1]}, "here")
    processor.save(tmp_path)
    assert ImageProcessor.from_folder(tmp_path) == processor
    (tmp_path / FILE).write_text(json.dumps({"feature_extractor_type": "WhisperFeatureExtractor"}))
    assert ImageProcessor.from_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"size": {"height": 10**9, "width": 2}, **NORMALIZED}, "1 to 4096 pixels"),
        ({"size": "large", **NORMALIZED}, "expected a size"),
        ({"image_mean": ["a"], "image_std": [1.0]}, "image_mean is"),
        ({"image_mean": [0.5], "image_std": [0.0]}, "impossible value"),
        ({"do_pad": True, **NORMALIZED}, "do_pad is a step"),
    ],
)
def test_impossible_settings_are_one_sentence(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ImageProcessor.from_values(values, "preprocessor_config.json")


def test_images_of_different_sizes() -> None:
    processor = ImageProcessor.from_values({"do_resize": False, **NORMALIZED}, "here")
    with pytest.raises(ModelError, match="images of different sizes"):
        processor([image(4, 4), image(5, 4)], 3)
