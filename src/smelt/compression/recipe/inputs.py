"""From a recipe's settings to what the methods see and what the result is judged on; the two never overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from smelt.compression.recipe.recipe import CalibrationSettings, EvaluationSettings, Recipe
from smelt.data import Batch, LabeledData, MultipleChoiceData, TextData, labeled_batches, load_data, text_batches
from smelt.errors import DataError, RecipeError
from smelt.measure.eval_result import EvalResult
from smelt.measure.evaluate import evaluate
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress

Data = TextData | LabeledData | MultipleChoiceData
HELD_OUT = 0.2  # of the calibration data, where no other data was named to evaluate on


def needs_data(recipe: Recipe) -> bool:
    """Whether a step looks at data, be it only for its repair; data that was named is used in any case."""
    return any(step.uses_data for step in recipe.steps) or recipe.data.source != "default"


def calibration_data(recipe: Recipe, model: Model) -> TextData | LabeledData:
    """All of the data that calibration may draw from, once it is sure that this model can take it."""
    settings = recipe.data
    if model.tokenizer is None:
        raise DataError("this model has no tokenizer, so text cannot be given to it; use a method that needs no data.")
    data = _read(settings, model, "calibration")
    if isinstance(data, MultipleChoiceData):
        raise DataError(f"{settings.source} holds multiple-choice rows, which calibration cannot use; give text.")
    _check_kind(model, data, settings.source)
    _check_loss(recipe, model)
    if isinstance(data, LabeledData) and model.task == "classification":
        return _fitting_labels(model, data)
    return data


def _read(settings: CalibrationSettings | EvaluationSettings, model: Model, part: str) -> Data:
    """What the settings name. A language model reads the text column of labeled rows as text when that is named."""
    kind = "text" if model.task == "language" and settings.text is not None and settings.label is None else None
    return load_data(
        settings.source or "default",
        kind=kind,
        text=settings.text,
        pair=settings.pair,
        label=settings.label,
        split=part,
    )


def split(recipe: Recipe, data: TextData | LabeledData) -> tuple[TextData | LabeledData, Data | None]:
    """What calibration sees, and what is held out when nothing else was named to evaluate on."""
    if recipe.evaluate.source is not None or recipe.data.source == "default":
        return data, None
    if isinstance(data, LabeledData):
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
    if recipe.evaluate.source is not None:
        return _read(recipe.evaluate, model, "evaluation")
    if held_out is not None and _measurable(model, held_out):
        return held_out
    if model.task == "language":
        return load_data("default")
    return None


def _measurable(model: Model, data: Data) -> bool:
    """Whether there is a measurement of this kind of model on this kind of data."""
    if isinstance(data, LabeledData):
        return model.task == "classification" or (model.task == "embedding" and data.second is not None)
    return model.task == "language"


def calibration_batches(
    settings: CalibrationSettings, data: TextData | LabeledData, model: Model, seed: int
) -> list[Batch]:
    """Windows of text of exactly the length asked for, or labeled rows cut to what the model takes."""
    assert model.tokenizer is not None
    assert settings.batch_size is not None
    longest = getattr(model.network.config, "max_position_embeddings", settings.seq_len)
    if isinstance(data, LabeledData):
        return labeled_batches(
            data, model.tokenizer, samples=settings.samples, max_length=min(settings.seq_len, longest),
            batch_size=settings.batch_size, seed=seed, replace=settings.samples > len(data),
        )  # fmt: skip
    if settings.seq_len > longest:
        raise RecipeError(
            f"the recipe asks for samples of {settings.seq_len} tokens; this model takes at most {longest}."
        )
    return text_batches(
        data,
        model.tokenizer,
        samples=settings.samples,
        length=settings.seq_len,
        batch_size=settings.batch_size,
        seed=seed,
    )


def measure_quality(
    model: Model, data: Data, settings: EvaluationSettings, progress: Progress | None = None, kv: str | None = None
) -> EvalResult:
    """The model's quality on the data, by the recipe's settings; on text also with keys and values in another format
    than the one that the model remembers."""
    options: dict[str, Any] = {
        "batch_size": settings.batch_size,
        "limit": settings.limit,
        "progress": progress or NullProgress(),
    }
    if isinstance(data, TextData):
        context = min(settings.context, getattr(model.network.config, "max_position_embeddings", settings.context))
        options |= {"context": context, "kv": kv}
    elif kv is not None:
        raise DataError("a format of keys and values is measured on text, by perplexity; this data is not plain text.")
    return evaluate(model, data, metric=settings.metric, **options)


def fingerprint(batches: Sequence[Batch]) -> str:
    """A short name of the exact calibration data, for the record and for resuming."""
    digest = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            digest.update(name.encode())
            digest.update(batch[name].contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_kind(model: Model, data: TextData | LabeledData, source: str) -> None:
    if model.task == "language" and isinstance(data, LabeledData):
        raise DataError(f"{source} holds labeled rows, but this is a language model: name the text column to use it.")
    if model.task == "classification" and isinstance(data, TextData):
        raise DataError(
            f"{source} has no labels, but this is a classifier: give a file with a label column, or name it."
        )


def _fitting_labels(model: Model, data: LabeledData) -> LabeledData:
    """The data with labels as the model's loss takes them: classes it knows, or numbers where it has one output."""
    classes = model.network.config.num_labels
    if classes == 1:
        return replace(data, labels=data.labels.astype(np.float32), regression=True)
    if data.regression:
        raise DataError(f"{data.name} has numbers as labels, but the model tells {classes} classes apart.")
    if data.labels.max() >= classes:
        raise DataError(
            f"{data.name} has the label {data.labels.max()}, but the model tells only {classes} classes apart."
        )
    return data


def _check_loss(recipe: Recipe, model: Model) -> None:
    """A method that follows gradients needs a head that gives a loss."""
    name = next((step.name for step in recipe.steps if "gradients" in step.needs), None)
    if name is not None and model.task == "embedding":
        raise RecipeError(f"{name} needs a head with a loss, which this model lacks; use flap, wanda-sp or magnitude.")
