"""Sample images from a class-conditional diffusion model: DDIM or DDPM steps with classifier-free guidance.

An image of several classes follows the mean of the noise that is predicted for each of them. The model has never seen
the mean of two embeddings, for which it predicts noise without detail: images are blurred.

Papers: Song et al., 2021 (DDIM, arXiv 2010.02502); Ho and Salimans, 2022 (classifier-free guidance, arXiv 2207.12598);
Liu et al., 2022 (composed conditions, arXiv 2206.01714).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smelt.errors import ModelError
from smelt.models.image_diffusion import MODEL_TYPE, ImageDiffusionConfig, ImageDiffusionModel
from smelt.models.load import load, load_config
from smelt.progress import NullProgress, Progress


@dataclass(frozen=True)
class SamplingSettings:
    """How images are sampled."""

    steps: int = 50
    guidance: float = 2.0  # 1: none; larger ones make images more typical of their classes, and more alike
    eta: float = 0.0  # 0: DDIM; 1: DDPM, with fresh noise in every step
    batch_size: int = 256


def load_generator_config(folder: str | Path) -> ImageDiffusionConfig:
    """Load the config of a diffusion model; raise if the folder holds another kind of model."""
    config = load_config(folder)
    if not isinstance(config, ImageDiffusionConfig):
        raise ModelError(
            f"{folder} is a {config.model_type} model, not a generator of images: give a folder that `smelt train` "
            f"wrote with `task: diffusion` (model_type {MODEL_TYPE})."
        )
    return config


def load_generator(folder: str | Path, device: str = "cpu") -> ImageDiffusionModel:
    """Load a diffusion model in eval mode, in float32."""
    load_generator_config(folder)
    network = load(folder, dtype=torch.float32, device=device).network
    assert isinstance(network, ImageDiffusionModel)
    return network


def guided_noise(
    network: ImageDiffusionModel, noisy: Tensor, steps: Tensor, conditions: Tensor, guidance: float
) -> Tensor:
    """Return the predicted noise, moved away from that of images of any class: `e + g (mean of e_c - e)`.

    `conditions` are those of the classes of each image, [images, classes, size].
    """
    images, classes, _ = conditions.shape
    every = [*conditions.unbind(1), network.no_class(images)][: classes + (guidance != 1)]
    predicted = network.predict_noise(
        noisy.repeat(len(every), 1, 1, 1), steps.repeat(len(every)), torch.cat(every)
    ).unflatten(0, (len(every), images))
    conditional = predicted[:classes].mean(0)
    if len(every) == classes:
        return conditional
    unconditional: Tensor = predicted[classes]
    return unconditional + guidance * (conditional - unconditional)


@torch.no_grad()
def sample_images(
    network: ImageDiffusionModel,
    conditions: Tensor,
    *,
    seed: int,
    settings: SamplingSettings = SamplingSettings(),  # noqa: B008
    progress: Progress = NullProgress(),  # noqa: B008
) -> Tensor:
    """Return images in [-1, 1], [images, channels, height, width] on CPU.

    `conditions` are those of the classes of each image, [images, classes, size].
    The noise of an image depends on the seed and its index alone, not on its conditions.
    """
    config, device = network.config, conditions.device
    schedule = network.schedule
    times = torch.linspace(config.diffusion_steps - 1, 0, settings.steps).round().long().unique().flip(0).tolist()
    shape = (config.num_channels, config.image_size, config.image_size)
    generator, parts = torch.Generator().manual_seed(seed), []
    for chosen in progress.track(conditions.split(settings.batch_size), "generated images"):
        images = torch.randn(len(chosen), *shape, generator=generator).to(device)
        for time, previous in zip(times, [*times[1:], -1], strict=True):
            steps, earlier = (torch.full((len(chosen),), value, device=device) for value in (time, previous))
            noise = guided_noise(network, images, steps, chosen, settings.guidance)
            predicted = schedule.predict_images(images, noise, steps).clamp(-1, 1)
            fresh = torch.randn(images.shape, generator=generator).to(device) if settings.eta else None
            images = schedule.step(predicted, images, steps, earlier, settings.eta, fresh)
        parts.append(images.cpu())
    return torch.cat(parts)


def to_pixels(images: Tensor) -> Tensor:
    """Convert images in [-1, 1] to bytes."""
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
