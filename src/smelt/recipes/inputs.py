"""From a recipe's settings to what the methods see and what the result is judged on; the two never overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from smelt.data import Batch, ChoiceData, LabelledData, TextData, labelled_batches, load_data, text_batches
from smelt.errors import DataError
from smelt.measure.evaluate import evaluate
from smelt.measure.quality import Quality
from smelt.models.model import Model
from smelt.progress import Silent, Watcher
from smelt.recipes.recipe import CalibrationSettings, EvaluationSettings, Recipe

Data = TextData | LabelledData | ChoiceData
HELD_OUT = 0.2  # of the calibration data, where no other data was named to evaluate on


def needs_data(recipe: Recipe) -> bool:
    return any("calibration data" in step.needs for step in recipe.steps)


def calibration_data(recipe: Recipe, model: Model) -> TextData | LabelledData:
    """All of the data that calibration may draw from."""
    settings = recipe.data
    if model.tokenizer is None:
        raise DataError("this model has no tokenizer, so text cannot be given to it; use a method that needs no data.")
    data = load_data(settings.source, text=settings.text, pair=settings.pair, label=settings.label, split="calibration")
    if isinstance(data, ChoiceData):
        raise DataError(f"{settings.source} holds multiple-choice rows, which calibration cannot use; give text.")
    _check_kind(model, data, settings.source)
    return data


def split(recipe: Recipe, data: TextData | LabelledData) -> tuple[TextData | LabelledData, Data | None]:
    """What calibration sees, and what is held out when nothing else was named to evaluate on."""
    if recipe.evaluate.source is not None or recipe.data.source == "default":
        return data, None
    if isinstance(data, LabelledData):
        order = np.random.Generator(np.random.PCG64(0)).permutation(len(data))
        held = max(1, int(len(data) * HELD_OUT))
        if held >= len(data):
            raise DataError(f"{data.name} has too few rows to hold some out; name other data to evaluate on.")
        return data.take(np.sort(order[held:])), replace(
            data.take(np.sort(order[:held])), name=f"{data.name} (held out)"
        )
    text = data.joined
    cut = int(len(text) * (1 - HELD_OUT))
    return TextData(data.name, (text[:cut],)), TextData(f"{data.name} (held out)", (text[cut:],))


def evaluation_data(recipe: Recipe, held_out: Data | None, model: Model) -> Data | None:
    """What before and after are compared on, or None where there is nothing fit for this model."""
    settings = recipe.evaluate
    if settings.source is not None:
        return load_data(settings.source, text=settings.text, pair=settings.pair, label=settings.label)
    if held_out is not None:
        return held_out
    if model.task == "language":
        return load_data("default")
    return None


def calibration_batches(
    settings: CalibrationSettings, data: TextData | LabelledData, tokenizer: PreTrainedTokenizerBase, seed: int
) -> list[Batch]:
    if isinstance(data, TextData):
        return text_batches(
            data, tokenizer, samples=settings.samples, length=settings.length, batch_size=settings.batch, seed=seed
        )
    return labelled_batches(
        data, tokenizer, samples=settings.samples, max_length=settings.length, batch_size=settings.batch, seed=seed,
        replace=settings.samples > len(data),
    )  # fmt: skip


def measure_quality(model: Model, data: Data, settings: EvaluationSettings, watcher: Watcher | None = None) -> Quality:
    """The model's quality on the data, by the recipe's settings."""
    options: dict[str, Any] = {"batch_size": settings.batch, "watcher": watcher or Silent()}
    if isinstance(data, TextData):
        context = min(settings.context, getattr(model.network.config, "max_position_embeddings", settings.context))
        options |= {"context": context, "limit": settings.limit}
    return evaluate(model, data, metric=settings.metric, **options)


def fingerprint(batches: Sequence[Batch]) -> str:
    """A short name of the exact calibration data, for the record and for resuming."""
    digest = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            digest.update(name.encode())
            digest.update(batch[name].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_kind(model: Model, data: TextData | LabelledData, source: str) -> None:
    if model.task == "language" and isinstance(data, LabelledData):
        raise DataError(f"{source} holds labelled rows, but this is a language model: name the text column to use it.")
    if model.task == "classification" and isinstance(data, TextData):
        raise DataError(
            f"{source} has no labels, but this is a classifier: give a file with a label column, or name it."
        )
