"""`smelt compress --method nce`: an image classifier gets other widths and is trained at 2 bits; what cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from smelt.measure.cost import Workload, block_macs, block_parameters
from smelt.models.load import load
from smelt.models.quantized import quantized_layers
from tests.cli.conftest import Place, Smelt
from tests.tiny import BUILDS

EXAMPLE = Path(__file__).parents[2] / "examples" / "nce-2bit.yaml"
QUICK = ("epochs=3", "batch_size=16", "width_lr=0.2", "threshold=0.14")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ResNet and an archive of images of five classes."""
    root = tmp_path_factory.mktemp("channels")
    network = BUILDS["resnet"]()
    network.config.image_size = 32
    network.save_pretrained(root / "resnet")
    values = {"do_resize": False, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (root / "resnet" / "preprocessor_config.json").write_text(json.dumps(values))
    generator = np.random.Generator(np.random.PCG64(0))
    for split, count in (("train", 80), ("test", 20)):
        labels = np.arange(count) % 5
        pixels = generator.integers(0, 100, (count, 32, 32, 3)).astype(np.uint8)
        for image, label in zip(pixels, labels, strict=True):
            image[6 * label : 6 * label + 6, 6 * label : 6 * label + 6] += 150
        arrays = {f"x_{split}": pixels, f"y_{split}": labels}
        np.savez(root / f"{split}.npz", **arrays)
    stored = {name: array for split in ("train", "test") for name, array in np.load(root / f"{split}.npz").items()}
    np.savez(root / "images.npz", **stored)
    return root


def test_compress_then_inspect_and_eval(folder: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    settings = [argument for setting in QUICK for argument in ("--set", setting)]
    done = smelt_here(
        "compress", str(folder / "resnet"), "--method", "nce", "--budget", "macs=1.0", *settings,
        "--set", "second_budget=parameters=0.9", "--data", str(folder / "images.npz"), "--samples", "80",
        "--no-speed", "-o", out,
    )  # fmt: skip
    assert done.code == 0 and "saved and verified" in done.out, done
    facts = json.loads((tmp_path / "out" / "measurements.json").read_text())["steps"][0]["facts"]
    source, result = load(str(folder / "resnet")), load(out)
    assert [part.units for part in result.anatomy.parts] == [width for _, width in facts["widths"].values()]
    work = Workload(image_size=32)
    assert block_macs(result.anatomy, work) == facts["macs_kept"] * block_macs(source.anatomy, work)
    assert block_parameters(result.anatomy) <= 0.9 * block_parameters(source.anatomy)
    assert smelt_here("eval", out, "--data", str(folder / "images.npz")).code == 0
    done = smelt_here("inspect", out)
    assert done.code == 0 and all(f"{width} channels" in done.out for _, width in facts["widths"].values()), done
    smelt_here("export", out, "--to", "onnx", "-o", str(tmp_path / "onnx.onnx"))


def test_the_example_searches_then_trains_at_2_bits(folder: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    content: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    content["data"] |= {"samples": 80, "batch_size": 16}
    for step in content["steps"]:
        step |= {"epochs": 2, "batch_size": 16}
    recipe = tmp_path / "nce.yaml"
    recipe.write_text(yaml.safe_dump(content))
    out = tmp_path / "out"
    arguments = ("-r", str(recipe), "--data", str(folder / "images.npz"), "--no-speed", "-o", str(out))
    done = smelt_here("compress", str(folder / "resnet"), *arguments)
    assert done.code == 0 and "saved and verified" in done.out, done
    steps = json.loads((out / "measurements.json").read_text())["steps"]
    assert [step["name"] for step in steps] == ["nce", "qat"]
    network = load(out).network
    layers = quantized_layers(network)
    assert len(layers) == 8 and all(layer.scheme.weight.bits == 2 for layer in layers.values())
    assert [entry["method"] for entry in load(out).history] == ["nce", "qat"]
    assert smelt_here("plan", str(folder / "resnet"), *arguments[:4]).code == 0


@pytest.mark.parametrize(
    ("model", "budget", "words"),
    [("resnet", "macs=0.05", "allow at least macs="), ("resnet", "latency=0.5", "budgets of nce are of macs"),
     ("llama", "macs=0.9", "this is a llama network")],
)  # fmt: skip
def test_what_cannot_work(
    model: str, budget: str, words: str, place: Place, folder: Path, smelt_here: Smelt, tmp_path: Path
) -> None:
    source = place / "llama" if model == "llama" else str(folder / model)
    data = place / "text.txt" if model == "llama" else str(folder / "images.npz")
    arguments = ["--method", "nce", "--budget", budget, "--data", data, "--samples", "64", "--no-speed"]
    done = smelt_here("compress", source, *arguments, "-o", str(tmp_path / "out"))
    done.refused(words)
    assert "loading" not in done.err, "before any weight is read"
    assert not (tmp_path / "out").exists()
