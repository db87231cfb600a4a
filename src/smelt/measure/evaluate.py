"""The quality of a model on data: picks the measurement that fits both."""

from __future__ import annotations

from typing import Any

from smelt.data import ChoiceData, LabelledData, TextData
from smelt.errors import DataError
from smelt.measure.multiple_choice import choice_accuracy
from smelt.measure.perplexity import perplexity
from smelt.measure.quality import Quality, meets
from smelt.measure.task import task_quality
from smelt.models.model import Model

__all__ = ["Quality", "evaluate", "meets"]

Data = TextData | LabelledData | ChoiceData

_DATA_FOR_TASK = {
    "language": (TextData, ChoiceData),
    "classification": (LabelledData,),
    "embedding": (LabelledData,),
}
_NAMES = {TextData: "plain text", LabelledData: "labelled rows", ChoiceData: "multiple-choice rows"}


def evaluate(model: Model, data: Data, *, metric: str | None = None, **settings: Any) -> Quality:
    """Perplexity on text, accuracy on multiple choice, the metric on labelled rows. `settings` go on to these."""
    _check_fit(model, data)
    if isinstance(data, LabelledData):
        return task_quality(model, data, metric=metric, **settings)
    measured = "perplexity" if isinstance(data, TextData) else "accuracy"
    if metric not in (None, measured):
        raise DataError(f"The metric '{metric}' does not fit {_NAMES[type(data)]}: there it is {measured}.")
    if isinstance(data, TextData):
        return perplexity(model, data, **settings)
    return choice_accuracy(model, data, **settings)


def _check_fit(model: Model, data: Data) -> None:
    taken = _DATA_FOR_TASK.get(model.task)
    if taken is None:
        raise DataError(f"There is no quality measurement yet for a model of the kind '{model.task}'.")
    if type(data) not in taken:
        expected = " or ".join(_NAMES[kind] for kind in taken)
        raise DataError(
            f"{data.name} holds {_NAMES[type(data)]}, but {model.source or 'the model'} is a model for {model.task}: "
            f"give {expected}."
        )
