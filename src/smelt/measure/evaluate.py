"""Evaluate a model on data, with the measurement that fits both."""

from __future__ import annotations

from typing import Any

from smelt.data import Demonstrations, Environment, LabeledData, LabeledImages, MultipleChoiceData, SpeechData, TextData
from smelt.errors import DataError
from smelt.measure.eval_result import EvalResult, meets_threshold
from smelt.measure.images import evaluate_images, is_zero_shot
from smelt.measure.multiple_choice import evaluate_multiple_choice
from smelt.measure.perplexity import perplexity
from smelt.measure.policies import demonstrations_metric, evaluate_demonstrations, evaluate_episodes
from smelt.measure.speech import evaluate_speech
from smelt.measure.task import evaluate_task
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress, progress_bars

__all__ = ["EvalResult", "evaluate", "measure_quality", "meets_threshold"]

Data = TextData | LabeledData | MultipleChoiceData | LabeledImages | SpeechData | Demonstrations | Environment

_DATA_FOR_TASK = {
    "language": (TextData, MultipleChoiceData),
    "classification": (LabeledData,),
    "embedding": (LabeledData,),
    "images": (LabeledImages,),
    "speech": (SpeechData,),
    "policy": (Environment, Demonstrations),
}
_NAMES = {
    TextData: "plain text",
    LabeledData: "labeled rows",
    MultipleChoiceData: "multiple-choice rows",
    LabeledImages: "images",
    SpeechData: "recordings",
    Demonstrations: "demonstrations",
    Environment: "an environment",
}


def evaluate(model: Model, data: Data, *, metric: str | None = None, **settings: Any) -> EvalResult:
    """Measure perplexity on text, accuracy on multiple choice, WER on recordings, the return in an environment, or
    `metric` on labeled rows, images or demonstrations, passing on `settings`. Progress is shown unless `progress` says
    otherwise."""
    _check_fit(model, data)
    if "progress" not in settings:
        with progress_bars() as progress:
            return evaluate(model, data, metric=metric, progress=progress, **settings)
    if isinstance(data, SpeechData):
        return evaluate_speech(model, data, metric=metric, **settings)
    if isinstance(data, LabeledImages):
        return evaluate_images(model, data, metric=metric, **settings)
    if isinstance(data, LabeledData):
        return evaluate_task(model, data, metric=metric, **settings)
    if isinstance(data, Demonstrations):
        return evaluate_demonstrations(model, data, metric=metric, **settings)
    supported = expected_metric(data)
    if metric not in (None, supported):
        raise DataError(f"The metric '{metric}' does not fit {_NAMES[type(data)]}: use {supported}.")
    if isinstance(data, TextData):
        return perplexity(model, data, **settings)
    if isinstance(data, Environment):
        settings.pop("batch_size", None)  # all episodes run as one batch
        return evaluate_episodes(model, data, **settings)
    return evaluate_multiple_choice(model, data, **settings)


def expected_metric(data: Data, metric: str | None = None) -> str:
    """Return the metric by which data is evaluated, as far as that is known without the model."""
    if isinstance(data, TextData):
        return "perplexity"
    if isinstance(data, MultipleChoiceData):
        return "accuracy"
    if isinstance(data, SpeechData):
        return "wer"
    if isinstance(data, Environment):
        return "return"
    if isinstance(data, Demonstrations):
        return demonstrations_metric(data)
    if isinstance(data, LabeledImages):
        return metric or "accuracy"
    return metric or ("spearman" if data.regression else "accuracy")


def measure_quality(
    model: Model,
    data: Data,
    *,
    metric: str | None = None,
    normalize: str | None = None,
    context: int,
    limit: int | None,
    batch_size: int,
    kv: str | None = None,
    progress: Progress | None = None,
) -> EvalResult:
    """Evaluate with the settings of a recipe: `context` and `kv` matter for text, `normalize` for multiple choice.

    The context is at most that of the model; `kv` overrides the KV cache format saved with the model.
    """
    if normalize is not None and not isinstance(data, MultipleChoiceData):
        raise DataError(f"A normalization is for multiple-choice rows; {data.name} holds {_NAMES[type(data)]}.")
    settings: dict[str, Any] = {"limit": limit, "batch_size": batch_size, "progress": progress or NullProgress()}
    if isinstance(data, TextData):
        max_context = getattr(model.network.config, "max_position_embeddings", context)
        settings |= {"context": min(context, max_context), "kv": kv}
    elif kv is not None:
        raise DataError("a KV cache format is evaluated on text, by perplexity; this data is not plain text.")
    if normalize is not None:
        settings["normalize"] = normalize
    return evaluate(model, data, metric=metric, **settings)


def _check_fit(model: Model, data: Data) -> None:
    accepted = (LabeledImages,) if is_zero_shot(model) else _DATA_FOR_TASK.get(model.task)
    if accepted is None:
        raise DataError(f"There is no quality measurement yet for models of the task '{model.task}'.")
    if type(data) not in accepted:
        expected = " or ".join(_NAMES[data_type] for data_type in accepted)
        raise DataError(
            f"{data.name} holds {_NAMES[type(data)]}, but {model.source or 'the model'} is a model for {model.task}: "
            f"give {expected}."
        )
