"""Image models on the command line: compressed with a folder of images, evaluated, gated and reloaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from smelt.compression.recipe.recipe import Recipe
from smelt.compression.recipe.run import compress
from smelt.errors import DataError, ModelError
from smelt.models.load import load
from smelt.models.quantized import quantized_layers
from tests.cli.conftest import Smelt
from tests.tiny import BUILDS

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ResNet, a ViT and images of two classes."""
    root = tmp_path_factory.mktemp("images")
    generator = np.random.Generator(np.random.PCG64(0))
    for name in ("resnet", "vit"):
        network = BUILDS[name]()
        network.config.image_size = 32
        network.save_pretrained(root / name)
        values = {"do_resize": True, "size": {"height": 32, "width": 32}, "image_mean": [0.5], "image_std": [0.5]}
        (root / name / "preprocessor_config.json").write_text(json.dumps(values))
    for index in range(24):
        (root / "images" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (20, 30, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(root / "images" / "ab"[index % 2] / f"{index}.png")
    return root


@pytest.mark.parametrize("name", ["resnet", "vit"])
def test_compress_and_evaluate(name: str, folder: Path, tmp_path: Path, smelt_here: Smelt) -> None:
    result = smelt_here(
        "compress", str(folder / name), "--method", "gptq", "--bits", "8", "--group-size", "-1",
        "--data", str(folder / "images"), "--max-drop", "90pt", "--no-speed", "-o", str(tmp_path / "out"),
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "accuracy" in result.out and "gate passed" in result.out
    model = load(tmp_path / "out")
    assert quantized_layers(model.network) and model.image_processor is not None
    result = smelt_here(
        "eval", str(tmp_path / "out"), "--data", str(folder / "images"), "--against", str(folder / name)
    )
    assert result.code in (0, 3) and "accuracy" in result.out, result.err


def test_what_is_missing_is_said_before_the_run(folder: Path, tmp_path: Path) -> None:
    def refused(words: str, error: type[Exception], model: str = "resnet", **data: str) -> None:
        recipe = Recipe.parse({"data": data, "steps": [{"method": "gptq"}]})
        with pytest.raises(error, match=words):
            compress(str(folder / model), recipe, tmp_path / "out")
        assert not list(tmp_path.glob("out*"))

    refused("there are no default images", DataError)
    (tmp_path / "text.txt").write_text("some words " * 100)
    refused("holds no images", DataError, source=str(tmp_path / "text.txt"))
    BUILDS["resnet"]().save_pretrained(tmp_path / "plain")
    recipe = Recipe.parse({"data": {"source": str(folder / "images")}, "steps": [{"method": "gptq"}]})
    with pytest.raises(ModelError, match=r"no preprocessor_config\.json"):
        compress(str(tmp_path / "plain"), recipe, tmp_path / "out")
