"""Prepare images as a model expects them: resize, crop, rescale and normalize, as preprocessor_config.json says.

The same steps as transformers' image processors, without their packages. The file is untrusted, so sizes are bounded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smelt.errors import ModelError
from smelt.models.json_file import read_object

FILE = "preprocessor_config.json"
_MAX_SIDE = 4096
_BILINEAR = 2
_RESAMPLING = range(6)
# Steps of processors that are not implemented here, with the values that leave images as they are.
_UNSUPPORTED = {"do_pad": (None, False), "do_flip_channel_order": (None, False), "rescale_offset": (None, False)}


@dataclass(frozen=True)
class ImageProcessor:
    """The steps of preprocessing. `values` is the content of the file."""

    values: dict[str, Any]
    resize: tuple[int, int] | None  # to this height and width
    shortest_edge: int | None  # or to this length of the shorter side
    crop: tuple[int, int] | None  # height and width of the center
    resample: int
    factor: float
    mean: tuple[float, ...]  # of each channel, or one for all
    std: tuple[float, ...]

    @classmethod
    def from_folder(cls, folder: Path) -> ImageProcessor | None:
        """Read the file of a folder; None if it has none, or one for other inputs than images."""
        if not (folder / FILE).is_file():
            return None
        values = read_object(folder / FILE)
        if "image_processor_type" not in values and "image_mean" not in values:
            return None
        return cls.from_values(values, str(folder / FILE))

    @classmethod
    def from_values(cls, values: dict[str, Any], where: str) -> ImageProcessor:
        """Parse the content of a file."""
        for key, harmless in _UNSUPPORTED.items():
            if values.get(key) not in harmless:
                raise ModelError(f"{where}: {key} is a step that Smelt does not do; images cannot be prepared.")
        resize, shortest, crop = None, None, None
        if values.get("do_resize", "size" in values):
            resize, shortest = _size(values.get("size"), where)
        if values.get("do_center_crop", False):
            crop, _ = _size(values.get("crop_size", values.get("size")), where)
        if shortest is not None and "ConvNext" in str(values.get("image_processor_type", values.get("crop_pct"))):
            crop, resize, shortest = _convnext_steps(shortest, values.get("crop_pct"), where)
        factor = values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1.0
        mean: tuple[float, ...] = (0.0,)
        std: tuple[float, ...] = (1.0,)
        if values.get("do_normalize", True):
            mean, std = (_channels(values.get(key), f"{where}: {key}") for key in ("image_mean", "image_std"))
        resample = values.get("resample", _BILINEAR)
        if not isinstance(factor, float | int) or resample not in _RESAMPLING or 0.0 in std:
            raise ModelError(f"{where}: rescale_factor, resample or image_std has an impossible value.")
        return cls(values, resize, shortest, crop, resample, float(factor), mean, std)

    def save(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(self.values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def __call__(self, images: Sequence[Any], channels: int) -> Tensor:
        """Prepare PIL images: [images, channels, height, width] in float32."""
        rows = [self._prepare(image.convert("L" if channels == 1 else "RGB")) for image in images]
        if len({row.shape for row in rows}) > 1:
            raise ModelError(f"images of different sizes need a model whose {FILE} resizes them.")
        pixels = np.stack(rows).astype(np.float32) * np.float32(self.factor)  # [images, height, width, channels]
        values = (torch.from_numpy(pixels) - torch.tensor(self.mean)) / torch.tensor(self.std)
        return values.permute(0, 3, 1, 2).contiguous()

    def _prepare(self, image: Any) -> np.ndarray:
        height, width = self.resize or (image.height, image.width)
        if self.shortest_edge is not None:
            shorter = min(height, width)
            height, width = (int(self.shortest_edge * side / shorter) for side in (height, width))
        if (width, height) != image.size:
            image = image.resize((width, height), self.resample)
        if self.crop is not None:
            left, top = (image.width - self.crop[1]) // 2, (image.height - self.crop[0]) // 2
            image = image.crop((left, top, left + self.crop[1], top + self.crop[0]))  # pads with zeros
        pixels = np.asarray(image)
        return pixels[..., None] if pixels.ndim == 2 else pixels


def _size(value: Any, where: str) -> tuple[tuple[int, int] | None, int | None]:
    """Return height and width, or the length of the shortest edge."""
    if isinstance(value, int):
        value = {"height": value, "width": value}
    sides = [value.get(key) for key in ("height", "width", "shortest_edge")] if isinstance(value, dict) else [None]
    given = [side for side in sides if side is not None]
    if not given or not all(type(side) is int and 0 < side <= _MAX_SIDE for side in given):
        raise ModelError(f"{where}: expected a size of 1 to {_MAX_SIDE} pixels, not {str(value)[:80]}.")
    if isinstance(value, dict) and "shortest_edge" in value:
        return None, int(given[-1])
    return (int(given[0]), int(given[-1])), None


def _convnext_steps(
    edge: int, crop_ratio: Any, where: str
) -> tuple[tuple[int, int] | None, tuple[int, int] | None, int | None]:
    """Return crop, resize and shortest edge: below 384 pixels a larger image is cropped, otherwise it is warped."""
    ratio = 224 / 256 if crop_ratio is None else crop_ratio
    if not isinstance(ratio, float | int) or not 0.05 <= ratio <= 1:
        raise ModelError(f"{where}: crop_pct is {str(ratio)[:40]}, expected a fraction.")
    return (None, (edge, edge), None) if edge >= 384 else ((edge, edge), None, int(edge / ratio))


def _channels(value: Any, where: str) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    if not 1 <= len(values) <= 16 or not all(isinstance(number, float | int) for number in values):
        raise ModelError(f"{where} is {str(value)[:40]}, expected a number per channel.")
    return tuple(float(number) for number in values)
