"""From images to a quantized network that has never seen them: a generator is trained, prompted, and calibrates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from smelt.models.batch_norm import folded_norms
from smelt.models.load import load
from smelt.models.quantized import quantized_layers
from smelt.train.trainer.run_folder import RunFolder
from tests.cli.conftest import Smelt
from tests.tiny import BUILDS
from tests.train.trainer.runs import images, run_refused, run_training

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

TINY = {"hidden_sizes": [8, 8], "num_res_blocks": 1, "attention_levels": [], "diffusion_steps": 50}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 16 x 16 images of two classes, a generator trained on them, and a classifier of such images."""
    root = tmp_path_factory.mktemp("data-free")
    content = images(root, task="diffusion", model=TINY, steps=60, batch_size=32, optimizer={"lr": 5e-3})
    run_training(1, content, root / "run")
    network = BUILDS["resnet"]()
    config = network.config
    config.num_channels, config.image_size, config.num_labels = 1, 16, 2
    type(network)(config).save_pretrained(root / "resnet")
    values = {"do_resize": False, "image_mean": [0.5], "image_std": [0.5]}
    (root / "resnet" / "preprocessor_config.json").write_text(json.dumps(values))
    pixels = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (24, 16, 16)).astype(np.uint8)
    for index, image in enumerate(pixels):
        (root / "images" / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / "images" / "ab"[index % 2] / f"{index}.png")
    return root


def test_a_generator_learns_to_predict_noise_and_is_saved_as_safetensors(place: Path) -> None:
    losses = [entry["loss"] for entry in RunFolder(place / "run").read_log()]
    evaluated = RunFolder(place / "run").read_log()[-1]["evaluation"]
    assert losses[0] == pytest.approx(1.0, abs=0.1) and np.mean(losses[-10:]) < 0.6
    assert list(evaluated) == ["loss"] and evaluated["loss"] < 0.7
    files = {file.name for file in (place / "run" / "model").iterdir()}
    assert {"config.json", "model.safetensors"} <= files
    config = json.loads((place / "run" / "model" / "config.json").read_text())
    assert (config["model_type"], config["image_size"], config["num_channels"]) == ("image_diffusion", 16, 1)


def test_it_continues_and_refuses_what_it_cannot_generate(place: Path, tmp_path: Path) -> None:
    content = images(tmp_path, task="diffusion", model=str(place / "run" / "model"), steps=3, batch_size=32)
    first = run_training(1, content, tmp_path / "again")[0]
    assert first["loss"] < 0.75
    (error,) = run_refused(1, images(tmp_path, task="diffusion", model={**TINY, "image_size": 32}), tmp_path / "size")
    assert "generates 32 x 32 pixels, and" in str(error) and "16 x 16" in str(error)
    resnet = {"model_type": "resnet"}
    (error,) = run_refused(1, images(tmp_path, task="diffusion", model=resnet), tmp_path / "type")
    assert "trains a model of the type image_diffusion, not resnet" in str(error)


def test_generated_images_calibrate_a_network_on_the_command_line(
    place: Path, tmp_path: Path, smelt_here: Smelt
) -> None:
    source = f"generated:{place / 'run' / 'model'}?classes=mixup&steps=4"
    step = {
        "method": "brecq",
        "bits": 4,
        "input_activations": "int8",
        "iterations": 6,
        "lr": 0.03,
        "qdrop": 0.5,
        "weighting": "fisher",
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"data": {"source": source, "samples": 12, "batch_size": 4},
                                      "evaluate": {"source": str(place / "images")}, "steps": [step]}))  # fmt: skip
    done = smelt_here("compress", str(place / "resnet"), "-r", str(recipe), "--no-speed", "-o", str(tmp_path / "out"))
    assert done.code == 0, done.err
    model = load(tmp_path / "out")
    assert all(layer.scheme.static for layer in quantized_layers(model.network).values())
    recorded = json.loads((tmp_path / "out" / "smelt.json").read_text())
    assert source in json.dumps(recorded)
    assert recorded["folded_norms"] == folded_norms(model.network) != {}
    with torch.no_grad():
        assert model.network(torch.randn(2, 1, 16, 16)).logits.shape == (2, 2)
    assert smelt_here("inspect", str(tmp_path / "out")).code == 0
    shutil.copytree(tmp_path / "out", tmp_path / "same")
    compared = smelt_here("compare", str(tmp_path / "out"), str(tmp_path / "same"), "-o", str(tmp_path / "page.html"))
    assert compared.code == 0, compared.err


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("generated:{place}/run/model?classes=five", "must be single or mixup"),
        ("generated:{place}/resnet", "not a generator of images"),
        ("generated:{place}/nothing", "no model at"),
        ("{place}/empty", "contains no images"),
    ],
)
def test_what_cannot_calibrate_is_said_before_the_run(
    source: str, words: str, place: Path, tmp_path: Path, smelt_here: Smelt
) -> None:
    (place / "empty").mkdir(exist_ok=True)
    smelt_here(
        "compress", str(place / "resnet"), "--method", "brecq", "--data", source.format(place=place),
        "-o", str(tmp_path / "out"),
    ).refused(words)  # fmt: skip
    assert not (tmp_path / "out").exists()
