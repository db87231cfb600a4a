"""Scores of predictions against labels: accuracy, F1, Matthews, Pearson and Spearman correlation.

Every score takes `counts`, how often each item occurs in the sample: [items], or [resamples, items] for many samples at
once, which makes the bootstrap fast. By default every item occurs once. The result has the shape of `counts` without
its last dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Score = Callable[..., np.ndarray]


def accuracy(predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the fraction of correct predictions."""
    counts = _counts(labels, counts)
    return counts @ (predictions == labels).astype(float) / counts.sum(axis=-1)


def f1(predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the F1 of class 1 for classes 0 and 1; for more classes, the macro F1."""
    counts = _counts(labels, counts)
    classes = _classes(predictions, labels)
    classes = np.array([1]) if set(classes) <= {0, 1} else classes
    predicted, actual = predictions[:, None] == classes, labels[:, None] == classes  # [items, classes]
    right = counts @ (predicted & actual).astype(float)  # [..., classes]
    claimed_and_actual = counts @ (predicted.astype(float) + actual)
    # A class that does not occur in the sample is excluded from the mean.
    present = claimed_and_actual > 0
    scores = np.divide(2 * right, claimed_and_actual, out=np.zeros_like(right), where=present)
    return scores.sum(axis=-1) / np.maximum(present.sum(axis=-1), 1)


def matthews(predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the Matthews correlation for two or more classes; 0 if predictions or labels are constant."""
    counts = _counts(labels, counts)
    classes = _classes(predictions, labels)
    predicted = counts @ (predictions[:, None] == classes).astype(float)  # [..., classes]
    actual = counts @ (labels[:, None] == classes).astype(float)
    right, total = counts @ (predictions == labels).astype(float), counts.sum(axis=-1)
    covariance = right * total - (predicted * actual).sum(axis=-1)
    spread = (total**2 - (predicted**2).sum(axis=-1)) * (total**2 - (actual**2).sum(axis=-1))
    return _ratio(covariance, np.sqrt(spread))


def pearson(predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the Pearson correlation; 0 if predictions or labels are constant."""
    counts = _counts(labels, counts)
    return _weighted_pearson(predictions.astype(float), labels.astype(float), counts)


def spearman(predictions: np.ndarray, labels: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the Spearman correlation: Pearson's of the ranks, with ties at their mean rank."""
    counts = _counts(labels, counts)
    return _weighted_pearson(ranks(predictions, counts), ranks(labels, counts), counts)


def item_mean(scores: np.ndarray, labels: np.ndarray | None, counts: np.ndarray) -> np.ndarray:
    """Return the mean of the items' own scores, which are compared with no labels."""
    return counts @ scores / counts.sum(axis=-1)


def ranks(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return each value's rank in the sample, from 1, with ties at their mean rank. Same shape as `counts`."""
    distinct, group = np.unique(values, return_inverse=True)
    order = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[order], np.arange(len(distinct)))
    sizes = np.add.reduceat(counts[..., order], starts, axis=-1)  # [..., distinct values]
    return (np.cumsum(sizes, axis=-1) - (sizes - 1) / 2)[..., group]


def wer(errors: np.ndarray, words: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Return the word error rate: the errors of all items over the words of their references."""
    counts = _counts(words, counts)
    return counts @ errors / np.maximum(counts @ words, 1)


METRICS: dict[str, Score] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "spearman": spearman,
    "pearson": pearson,
    "wer": wer,
}
CLASSIFICATION_METRICS = ("accuracy", "f1", "matthews")


def _counts(labels: np.ndarray, counts: np.ndarray | None) -> np.ndarray:
    return np.ones(len(labels)) if counts is None else counts


def _classes(predictions: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.union1d(predictions, labels)


def _weighted_pearson(first: np.ndarray, second: np.ndarray, counts: np.ndarray) -> np.ndarray:
    first, second = _centered(first, counts), _centered(second, counts)
    spread = np.sqrt((counts * first**2).sum(axis=-1) * (counts * second**2).sum(axis=-1))
    return _ratio((counts * first * second).sum(axis=-1), spread)


def _centered(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Subtract the mean; differences within its rounding error become 0."""
    mean = (counts * values).sum(axis=-1, keepdims=True) / counts.sum(axis=-1, keepdims=True)
    distances = values - mean
    return np.where(np.abs(distances) > 1e-13 * np.abs(mean), distances, 0.0)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.zeros_like(np.asarray(above, dtype=float)), where=np.asarray(below) > 0)
