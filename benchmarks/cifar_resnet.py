"""The CIFAR-10 ResNets and images of the shared folder, as a model folder and class folders of JPEG files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from common import shared
from safetensors.torch import load_file
from torch import Tensor

from smelt.models.cifar_resnet import CifarResNetConfig, CifarResNetForImageClassification

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
WIDTHS = (16, 32, 64)
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": False,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def write_model(folder: Path, layers: int = 20) -> Path:
    """Write a ResNet of 20, 32, 44 or 56 layers as a model folder."""
    depth = (layers - 2) // 6
    config = CifarResNetConfig(
        embedding_size=WIDTHS[0], hidden_sizes=list(WIDTHS), depths=[depth] * 3, layer_type="basic",
        id2label=dict(enumerate(CLASSES)), label2id={name: index for index, name in enumerate(CLASSES)},
        image_size=32,
    )  # fmt: skip
    network = CifarResNetForImageClassification(config).eval()
    stored = load_file(shared() / "weights" / "cifar10_resnet" / f"resnet{layers}.safetensors")
    state = network.state_dict()
    state.update({_name(name): tensor for name, tensor in stored.items()})
    for stage in (1, 2):
        state.update(_shortcut(f"resnet.encoder.stages.{stage}.layers.0.shortcut", WIDTHS[stage - 1], WIDTHS[stage]))
    network.load_state_dict(state)
    network.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def write_images(folder: Path, split: str, count: int | None = None) -> Path:
    """Write the first images of a split into a folder per class."""
    with np.load(shared() / "data" / "cifar10_jpeg" / f"{split}.npz") as archive:
        blob, offset, labels = archive["blob"], archive["offset"], archive["label"]
    for name in CLASSES:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for index in range(len(labels) if count is None else count):
        image = blob[offset[index] : offset[index + 1]].tobytes()
        (folder / CLASSES[labels[index]] / f"{index:05}.jpg").write_bytes(image)
    return folder


def _name(name: str) -> str:
    """Return the name of a tensor in transformers."""
    block, _, tensor = name.rpartition(".")
    if block == "linear":
        return f"classifier.1.{tensor}"
    part = "normalization" if "bn" in block else "convolution"
    if block in ("conv1", "bn1"):
        return f"resnet.embedder.embedder.{part}.{tensor}"
    stage, index, layer = block.split(".")
    return f"resnet.encoder.stages.{int(stage[5:]) - 1}.layers.{index}.layer.{int(layer[-1]) - 1}.{part}.{tensor}"


def _shortcut(path: str, inputs: int, outputs: int) -> dict[str, Tensor]:
    """Return the 1x1 convolution that copies channels and pads with zero channels on both sides."""
    weight = torch.zeros(outputs, inputs, 1, 1)
    weight[outputs // 4 : outputs // 4 + inputs, :, 0, 0] = torch.eye(inputs)
    norm = f"{path}.normalization"
    return {
        f"{path}.convolution.weight": weight,
        f"{norm}.weight": torch.ones(outputs),
        f"{norm}.bias": torch.zeros(outputs),
        f"{norm}.running_mean": torch.zeros(outputs),
        f"{norm}.running_var": torch.full((outputs,), 1 - 1e-5),  # plus its epsilon: 1
    }
