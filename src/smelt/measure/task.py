"""Evaluate on labeled data: classifiers and regressors by logits, embedding models by cosine similarity of pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor
from torch.nn.functional import normalize

from smelt.data.batches import Batch, check_positive, labeled_batches
from smelt.data.image_files import LabeledImages
from smelt.data.labeled import LabeledData
from smelt.errors import DataError
from smelt.measure.eval_result import EvalResult
from smelt.measure.logits import eval_mode
from smelt.measure.metrics import CLASSIFICATION_METRICS, METRICS, ranks
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress

Outputs = Callable[[LabeledData, Callable[[Batch], Tensor]], np.ndarray]


def evaluate_task(
    model: Model,
    data: LabeledData,
    *,
    metric: str | None = None,
    max_length: int = 128,
    batch_size: int = 32,
    limit: int | None = None,
    progress: Progress = NullProgress(),  # noqa: B008
) -> EvalResult:
    """Compute the metric over all items or the first `limit`; by default accuracy (classes) or Spearman (numbers)."""
    check_positive(limit=limit)
    data = data if limit is None else data.take(range(min(limit, len(data))))
    embedding = model.task == "embedding"
    numbers = embedding or data.regression or model.network.config.num_labels == 1
    metric = _checked_metric(metric, numbers)
    outputs: Outputs = partial(_outputs, model, max_length, batch_size, progress)
    logits = None if embedding else outputs(data, lambda batch: model.network(**batch).logits)
    labels = data.labels if numbers else model_labels(model, data)
    predictions = (
        _cosine_similarities(model, data, outputs) if logits is None else _predictions(logits, labels, data, numbers)
    )
    return EvalResult(
        metric=metric,
        value=float(METRICS[metric](predictions, labels)),
        higher_is_better=True,
        data=data.name,
        items=_rank_agreement(predictions, labels) if numbers else (predictions == labels).astype(np.float64),
        predictions=predictions,
        labels=labels,
        logits=logits,
        settings={"max_length": max_length, "items": len(data)} | ({"pooling": "mean"} if embedding else {}),
    )


def _outputs(
    model: Model,
    max_length: int,
    batch_size: int,
    progress: Progress,
    data: LabeledData,
    compute: Callable[[Batch], Tensor],
) -> np.ndarray:
    """Return the output of `compute` for each item, in order. Batches are sorted by length to reduce padding."""
    if model.tokenizer is None:
        raise DataError(f"{model.source or 'This model'} has no tokenizer: it cannot be evaluated on text.")
    # A decoder without a padding token cannot find the end of a shorter row in a batch.
    batch_size = batch_size if model.network.config.pad_token_id is not None else 1
    order = sorted(
        range(len(data)), key=lambda item: len(data.first[item]) + len(data.second[item] if data.second else "")
    )
    batches = labeled_batches(
        data.take(order),
        model.tokenizer,
        samples=None,
        max_length=max_length,
        batch_size=batch_size,
        seed=0,
        shuffle=False,
    )
    rows = []
    with eval_mode(model.network):
        for batch in progress.track(batches, "evaluation"):
            inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if name != "labels"}
            rows.append(compute(inputs).float().cpu().numpy())
    return np.concatenate(rows)[np.argsort(order)]


def _checked_metric(metric: str | None, numbers: bool) -> str:
    allowed = [name for name in METRICS if (name in CLASSIFICATION_METRICS) != numbers and name != "wer"]
    if metric is None:
        return allowed[0]
    if metric not in allowed:
        label_type = "numbers" if numbers else "classes"
        raise DataError(f"The metric '{metric}' does not fit labels that are {label_type}: use {' or '.join(allowed)}.")
    return metric


def model_labels(model: Model, data: LabeledData | LabeledImages) -> np.ndarray:
    """Map labels to the model's numbering by class name, if both the file and the model have names."""
    assert data.labels is not None
    numbers = {str(name).lower(): number for name, number in model.network.config.label2id.items()}
    if data.classes is None or not all(name.lower() in numbers for name in data.classes):
        return data.labels
    return np.array([numbers[name.lower()] for name in data.classes], dtype=np.int64)[data.labels]


def _predictions(logits: np.ndarray, labels: np.ndarray, data: LabeledData, numbers: bool) -> np.ndarray:
    outputs = logits.shape[1]
    if numbers:
        if outputs != 1:
            raise DataError(f"{data.name} has numbers as labels, but the model has {outputs} classes.")
        return logits[:, 0].astype(np.float64)
    if outputs <= labels.max():
        raise DataError(f"{data.name} has the label {labels.max()}, but the model has only {outputs} classes.")
    return logits.argmax(axis=1)


def _cosine_similarities(model: Model, data: LabeledData, outputs: Outputs) -> np.ndarray:
    """Return the cosine similarity of each pair's embeddings. [items]"""
    if data.second is None:
        raise DataError(
            f"{data.name} has single texts, but an embedding model is evaluated on pairs: name a second column."
        )
    first = outputs(replace(data, second=None), partial(_embed, model))
    second = outputs(replace(data, first=data.second, second=None), partial(_embed, model))
    return (first * second).sum(axis=1, dtype=np.float64)


def _embed(model: Model, inputs: Batch) -> Tensor:
    """Return the normalized mean of the last hidden states over non-padding tokens. [rows, hidden size]"""
    states = model.network(**inputs).last_hidden_state  # [rows, tokens, hidden size]
    mask = inputs["attention_mask"][:, :, None].to(states.dtype)
    return normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=1)


def _rank_agreement(predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return 1 for items with equal ranks in predictions and labels, approaching 0 as the ranks diverge. [items]"""
    counts = np.ones(len(labels))
    return 1 - np.abs(ranks(predictions, counts) - ranks(labels, counts)) / len(labels)
