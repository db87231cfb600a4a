"""Image classifiers: pixels shifted and scaled by the mean and spread of the training images, a channel at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageClassification

from smelt.data.images import ImageData, load_images
from smelt.errors import DataError, ModelError
from smelt.train.trainer.config import TrainConfig
from smelt.train.trainer.task import Batch, TrainingTask, known_network, new_network

HELD_OUT = 10  # one in so many images of a source that has no test part
_LOOKED_AT = 10_000  # images, for mean and spread


class Images:
    """Images in memory as bytes; batches as floats."""

    def __init__(self, data: ImageData, mean: np.ndarray, spread: np.ndarray) -> None:
        self._data = data
        self._mean, self._spread = (torch.from_numpy(each).float().view(1, -1, 1, 1) for each in (mean, spread))

    def __len__(self) -> int:
        return len(self._data)

    def take(self, places: np.ndarray) -> Batch:
        pixels = torch.from_numpy(self._data.pixels[places]).float() / 255  # [batch, channels, height, width]
        return {
            "pixel_values": (pixels - self._mean) / self._spread,
            "labels": torch.from_numpy(self._data.labels[places]),
        }


def images_task(config: TrainConfig) -> TrainingTask:
    """An image classifier, new or known, on labeled images."""
    train, held_out = _parts(config)
    channels, classes = train.pixels.shape[1], max(train.classes, held_out.classes)
    if isinstance(config.model, str):
        network, _ = known_network(config.model, "images")
    else:
        values: dict[str, Any] = {"num_channels": channels, "num_labels": classes, **config.model}
        network = new_network(values, AutoModelForImageClassification, config.seed)
    _require_fit(network.config, channels, classes, config.data.train)
    looked = train.pixels[:: max(len(train) // _LOOKED_AT, 1)] / np.float64(255)
    mean, spread = looked.mean(axis=(0, 2, 3)), np.maximum(looked.std(axis=(0, 2, 3)), 1e-3)
    facts = {
        "images": len(train),
        "held_out": len(held_out),
        "classes": classes,
        "image_mean": mean.tolist(),
        "image_std": spread.tolist(),
    }
    return TrainingTask(network, Images(train, mean, spread), Images(held_out, mean, spread), True, facts=facts)


def _parts(config: TrainConfig) -> tuple[ImageData, ImageData]:
    train = load_images(config.data.train, "train")
    assert train is not None
    held_out = load_images(config.data.evaluate or config.data.train, "test")
    if held_out is None and config.data.evaluate is not None:
        held_out = load_images(config.data.evaluate, "train")
    if held_out is None:
        last = max(len(train) // HELD_OUT, 1)
        if last == len(train):
            raise DataError(f"{config.data.train} has one image; give more.")
        held_out = ImageData(train.name, train.pixels[-last:], train.labels[-last:])
        train = ImageData(train.name, train.pixels[:-last], train.labels[:-last])
    if held_out.pixels.shape[1:] != train.pixels.shape[1:]:
        raise DataError(f"images of {held_out.name} have another shape than those of {train.name}.")
    return train, held_out


def _require_fit(config: Any, channels: int, classes: int, source: str) -> None:
    for key, wanted in (("num_channels", channels), ("num_labels", classes)):
        known = getattr(config, key, wanted)
        if known < wanted or (key == "num_channels" and known != wanted):
            raise ModelError(f"the model has {key} = {known}, and {source} needs {wanted}.")
