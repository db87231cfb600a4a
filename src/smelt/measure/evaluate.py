"""The quality of a model on data: picks the measurement that fits both."""

from __future__ import annotations

from typing import Any

from smelt.data import LabeledData, MultipleChoiceData, TextData
from smelt.errors import DataError
from smelt.measure.eval_result import EvalResult, meets_threshold
from smelt.measure.multiple_choice import evaluate_multiple_choice
from smelt.measure.perplexity import perplexity
from smelt.measure.task import evaluate_task
from smelt.models.model import Model

__all__ = ["EvalResult", "evaluate", "meets_threshold"]

Data = TextData | LabeledData | MultipleChoiceData

_DATA_FOR_TASK = {
    "language": (TextData, MultipleChoiceData),
    "classification": (LabeledData,),
    "embedding": (LabeledData,),
}
_NAMES = {TextData: "plain text", LabeledData: "labeled rows", MultipleChoiceData: "multiple-choice rows"}


def evaluate(model: Model, data: Data, *, metric: str | None = None, **settings: Any) -> EvalResult:
    """Perplexity on text, accuracy on multiple choice, the metric on labeled rows. `settings` go on to these."""
    _check_fit(model, data)
    if isinstance(data, LabeledData):
        return evaluate_task(model, data, metric=metric, **settings)
    measured = "perplexity" if isinstance(data, TextData) else "accuracy"
    if metric not in (None, measured):
        raise DataError(f"The metric '{metric}' does not fit {_NAMES[type(data)]}: there it is {measured}.")
    if isinstance(data, TextData):
        return perplexity(model, data, **settings)
    return evaluate_multiple_choice(model, data, **settings)


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
