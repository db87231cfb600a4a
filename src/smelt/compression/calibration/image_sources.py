"""Calibration inputs without data: noise, inputs that match the statistics of batch norms, and generated images.

`generated:FOLDER` names a class-conditional diffusion model (`smelt train` with `task: diffusion`). A prompt names one
class (`?classes=single`) or two (`?classes=mixup`, the default), whose images have features of both: the paper reports
that networks calibrated on them generalize better. The prompts of both forms have the same seeds, and the class of a
single-class prompt is the first one of its mixup-class prompt.

Paper: Park et al., 2025 (mixup-class prompts, arXiv 2507.21947), which has a text-to-image model as its generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from smelt.compression.calibration.zero_shot import noise_inputs, synthesize_inputs
from smelt.data import Batch, LabeledImages, image_batches
from smelt.errors import DataError
from smelt.models.batch_norm import batch_norms
from smelt.models.image_generation import (
    SamplingSettings,
    load_generator,
    load_generator_config,
    sample_images,
    to_pixels,
)
from smelt.models.inputs import random_inputs
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress

MATCHED = "none"  # the source of inputs that match the statistics of batch norms
NOISE = "noise"  # the source of Gaussian noise
PREFIX = "generated:"  # of the folder of a diffusion model
PROMPTS = {"single": 1, "mixup": 2}  # classes of a prompt


@dataclass(frozen=True)
class GeneratorSource:
    """A diffusion model, and how it is prompted."""

    folder: str
    classes: str = "mixup"  # of a prompt: single or mixup
    guidance: float = SamplingSettings.guidance
    steps: int = SamplingSettings.steps

    @classmethod
    def parse(cls, source: str) -> GeneratorSource:
        """Parse `generated:FOLDER?classes=mixup&guidance=2&steps=50`."""
        folder, _, query = source.removeprefix(PREFIX).partition("?")
        values = dict(parse_qsl(query, keep_blank_values=True))
        readers: dict[str, Callable[[str], object]] = {"classes": str, "guidance": float, "steps": int}
        try:
            settings = cls(folder, **{key: readers[key](value) for key, value in values.items()})  # type: ignore[arg-type]
        except (KeyError, ValueError):
            raise DataError(
                f"{source} names a generator by generated:FOLDER?classes=mixup&guidance=2&steps=50; classes is "
                f"{' or '.join(PROMPTS)}."
            ) from None
        if settings.classes not in PROMPTS:
            raise DataError(f"classes of {source} is {settings.classes!r}; it must be {' or '.join(PROMPTS)}.")
        if not 0 <= settings.guidance <= 100 or not 1 <= settings.steps <= 1000:
            raise DataError(f"{source}: guidance must lie between 0 and 100, steps between 1 and 1000.")
        return settings


def is_synthetic(source: str) -> bool:
    """Return whether a source of calibration data is made from models alone."""
    return source in (MATCHED, NOISE) or source.startswith(PREFIX)


def check_synthetic_source(source: str, model: Model) -> None:
    """Raise if calibration data of this source cannot be made for a model, which may have no weights."""
    if source == MATCHED and not batch_norms(model.network):
        raise DataError(
            "calibration without data needs the statistics of batch norms, and this network has none; name data "
            "with --data."
        )
    if source.startswith(PREFIX):
        _check_generator(GeneratorSource.parse(source), model)
    elif source == NOISE:
        _input_shape(model, 1)


def synthetic_batches(
    source: str,
    model: Model,
    *,
    samples: int,
    seq_len: int,
    batch_size: int,
    seed: int,
    progress: Progress = NullProgress(),  # noqa: B008
) -> list[Batch]:
    """Return the inputs of a source; `seq_len` is the number of frames of a spectrogram."""
    if source.startswith(PREFIX):
        images = generate_images(GeneratorSource.parse(source), model, samples=samples, seed=seed, progress=progress)
        drawn = image_batches(images, model.prepare_images, samples=samples, batch_size=batch_size, seed=seed)
        dtype = next(model.network.parameters()).dtype
        return [{**batch, "pixel_values": batch["pixel_values"].to(dtype)} for batch in drawn]
    shape = _input_shape(model, seq_len)
    if source == NOISE:
        [batch] = noise_inputs(model.network, shape, "gaussian", samples=samples, seed=seed)
        name = model.network.main_input_name
        dtype = next(model.network.parameters()).dtype
        return [{name: part.to(dtype)} for part in batch[name].split(batch_size)]
    return synthesize_inputs(model.network, shape, samples=samples, batch_size=batch_size, seed=seed, progress=progress)


def generate_images(
    source: GeneratorSource,
    model: Model,
    *,
    samples: int,
    seed: int,
    progress: Progress = NullProgress(),  # noqa: B008
) -> LabeledImages:
    """Generate images with the classes of a model; those of mixup-class prompts have no labels."""
    _check_generator(source, model)
    network = load_generator(source.folder, str(model.device))
    labels = draw_prompts(samples, network.config.num_labels, PROMPTS[source.classes], seed).to(model.device)
    conditions = network.embed_classes(labels).detach()
    settings = SamplingSettings(source.steps, source.guidance)
    images = sample_images(network, conditions, seed=seed, settings=settings, progress=progress)
    name = f"{PREFIX}{source.folder} ({source.classes} prompts)"
    return LabeledImages(name, to_pixels(images).numpy(), labels[:, 0].cpu().numpy() if labels.shape[1] == 1 else None)


def draw_prompts(samples: int, num_classes: int, mixed: int, seed: int) -> Tensor:
    """Draw the different classes of each prompt, [samples, mixed]; the first does not depend on how many there are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, num_classes, generator=generator).argsort(1)[:, :mixed]


def _check_generator(source: GeneratorSource, model: Model) -> None:
    """Raise if a generator has other classes than a model, or makes images of another size."""
    if model.task != "images":
        raise DataError(f"{source.folder} generates images, but this is a model for {model.task}.")
    config, classifier = load_generator_config(source.folder), model.network.config
    if config.num_labels != classifier.num_labels:
        raise DataError(
            f"{source.folder} generates images of {config.num_labels} classes, and the model has "
            f"{classifier.num_labels}; train a generator on images with the classes of the model."
        )
    if config.num_labels < PROMPTS[source.classes]:
        raise DataError(f"a mixup-class prompt has two classes, and {source.folder} knows one; use classes=single.")
    names, own = config.id2label, classifier.id2label
    generic = {f"LABEL_{number}" for number in range(config.num_labels)}
    if not generic & {*names.values(), *own.values()} and names != own:
        different = next(number for number in own if names.get(number) != own[number])
        raise DataError(
            f"class {different} of {source.folder} is {names.get(different)}, and of the model {own[different]}; train "
            "a generator on images with the classes of the model."
        )
    channels, *size = _input_shape(model, 1)
    generated = [config.image_size, config.image_size]
    if (config.num_channels, generated) != (channels, size):
        raise DataError(
            f"{source.folder} generates {' x '.join(map(str, generated))} pixels with {config.num_channels} channels, "
            f"and the model reads {' x '.join(map(str, size))} with {channels}; train a generator for that size."
        )


def _input_shape(model: Model, frames: int) -> tuple[int, ...]:
    """Return the shape of one input that is synthesized: a spectrogram of so many frames, or an image."""
    config = model.network.config
    if model.network.main_input_name == "input_features":
        return int(config.num_mel_bins), frames
    if model.network.main_input_name != "pixel_values":
        raise DataError(f"inputs for a {config.model_type} network cannot be synthesized; name data with --data.")
    processor = model.image_processor
    channels, *size = random_inputs(model.network, batch=1)["pixel_values"].shape[1:]
    if processor is not None:
        edge = processor.shortest_edge
        size = list(processor.crop or processor.resize or (size if edge is None else (edge, edge)))
    return channels, *size
