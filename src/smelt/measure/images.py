"""Evaluate on labeled images: classifiers by their logits, CLIP models by the text that is most similar (zero-shot)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from smelt.data.batches import Batch, check_positive, image_batches
from smelt.data.image_files import LabeledImages
from smelt.errors import DataError
from smelt.measure.eval_result import EvalResult
from smelt.measure.logits import eval_mode
from smelt.measure.metrics import CLASSIFICATION_METRICS, METRICS
from smelt.measure.task import model_labels
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress

PROMPT = "a photo of a {}."  # of zero-shot classification (Radford et al., 2021)


def evaluate_images(
    model: Model,
    data: LabeledImages,
    *,
    metric: str | None = None,
    batch_size: int = 32,
    limit: int | None = None,
    progress: Progress = NullProgress(),  # noqa: B008
) -> EvalResult:
    """Compute accuracy, F1 or Matthews correlation over all images, or `limit` of them drawn with a fixed seed."""
    check_positive(limit=limit)
    metric = metric or CLASSIFICATION_METRICS[0]
    if metric not in CLASSIFICATION_METRICS:
        raise DataError(f"The metric '{metric}' does not fit classes: use {' or '.join(CLASSIFICATION_METRICS)}.")
    if data.labels is None:
        raise DataError(f"{data.name} has no labels: give a folder with a subfolder per class, or a label column.")
    if limit is not None and limit < len(data):  # folders are sorted by class, so the first images would not do
        data = data.take(np.sort(np.random.Generator(np.random.PCG64(0)).permutation(len(data))[:limit]))
    with eval_mode(model.network):
        logits = _compute(model, data, _classifier(model, data), batch_size, progress)
    labels = data.labels if is_zero_shot(model) else model_labels(model, data)
    assert labels is not None
    if logits.shape[1] <= labels.max():
        raise DataError(f"{data.name} has the label {labels.max()}, but the model has only {logits.shape[1]} classes.")
    predictions = logits.argmax(axis=1)
    return EvalResult(
        metric=metric,
        value=float(METRICS[metric](predictions, labels)),
        higher_is_better=True,
        data=data.name,
        items=(predictions == labels).astype(np.float64),
        predictions=predictions,
        labels=labels,
        logits=logits,
        settings={"items": len(data)} | ({"prompt": PROMPT} if is_zero_shot(model) else {}),
    )


def is_zero_shot(model: Model) -> bool:
    """Return whether a model embeds both images and text, as CLIP does."""
    return all(hasattr(model.network, name) for name in ("get_image_features", "get_text_features"))


def _classifier(model: Model, data: LabeledImages) -> Callable[[Batch], Tensor]:
    network: Any = model.network
    if not is_zero_shot(model):
        return lambda batch: network(**batch).logits
    if data.classes is None or model.tokenizer is None:
        raise DataError(
            f"zero-shot classification needs a tokenizer and class names, and {data.name} has only numbers."
        )
    prompts = [PROMPT.format(name.replace("_", " ")) for name in data.classes]
    tokens = model.tokenizer(prompts, padding=True, return_tensors="pt").to(model.device)
    texts = normalize(_embedding(network.get_text_features(**tokens)), dim=-1)  # [classes, width]
    scale = network.logit_scale.exp()
    return lambda batch: scale * normalize(_embedding(network.get_image_features(**batch)), dim=-1) @ texts.T


def _embedding(output: Any) -> Tensor:
    """Return the embedding of an output: transformers 5 wraps the tensor."""
    embedding: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return embedding


def _compute(
    model: Model, data: LabeledImages, classify: Callable[[Batch], Tensor], batch_size: int, progress: Progress
) -> np.ndarray:
    batches = image_batches(data, model.prepare_images, samples=None, batch_size=batch_size, seed=0)
    dtype = model.network.dtype
    rows = []
    for batch in progress.track(batches, "evaluation", total=-(-len(data) // batch_size)):
        pixels = batch["pixel_values"].to(model.device, dtype)
        rows.append(classify({"pixel_values": pixels}).float().cpu())
    return torch.cat(rows).numpy()
