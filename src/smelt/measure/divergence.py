"""Compare the next-token distributions of two language models on the same windows of text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from smelt.data.batches import check_positive
from smelt.data.text import TextData
from smelt.errors import DataError
from smelt.measure.logits import NewCache, eval_mode, logit_rows, slices
from smelt.measure.perplexity import (
    batched_windows,
    cache_factory,
    check_context,
    tokenize,
    window_inputs,
    windows_over,
)
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress


@dataclass(frozen=True)
class Divergence:
    """Means over tokens: KL(base || new) in nats, and the fraction of tokens with the same top prediction."""

    kl: float
    agreement: float
    tokens: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def logit_divergence(
    new: Model,
    base: Model,
    data: TextData,
    *,
    context: int = 1024,
    batch_size: int = 1,
    limit: int | None = None,
    kv: str | None = None,
    progress: Progress = NullProgress(),  # noqa: B008
) -> Divergence:
    """Run both models over non-overlapping windows and compare their predictions of every scored token.

    `kv` is the number format of the new model's KV cache, if not the one saved with it.
    """
    check_positive(batch_size=batch_size, limit=limit)
    vocabulary = _shared_vocabulary(new, base)
    for model in (new, base):
        check_context(model, context, context)
    tokens = tokenize(base, data, limit)
    groups = list(batched_windows(list(windows_over(len(tokens), context, context)), batch_size))
    totals = torch.zeros(3, dtype=torch.float64)
    caches = (cache_factory(new, kv), cache_factory(base, None))
    with eval_mode(new.network), eval_mode(base.network):
        for group in progress.track(groups, "divergence"):
            input_ids, scored = window_inputs(tokens, group, base.device)
            totals += _compare_batch((new, base), input_ids, scored, vocabulary, caches)
    kl, agreement, count = totals.tolist()
    return Divergence(kl=kl / count, agreement=agreement / count, tokens=int(count))


def _shared_vocabulary(new: Model, base: Model) -> int:
    sizes = [model.network.config.get_text_config().vocab_size for model in (new, base)]
    if sizes[0] != sizes[1]:
        raise DataError(
            f"The models have {sizes[0]:,} and {sizes[1]:,} tokens: only models with one vocabulary can be compared."
        )
    return int(sizes[0])


def _compare_batch(
    models: tuple[Model, Model], input_ids: Tensor, scored: Tensor, vocabulary: int, caches: tuple[NewCache | None, ...]
) -> Tensor:
    """Sum over the scored tokens: divergence, agreements, count. [3], float64"""
    keep = scored.roll(-1, dims=1)
    new_rows, base_rows = (
        logit_rows(
            model.network, input_ids.to(model.device), torch.ones_like(input_ids, device=model.device),
            keep.to(model.device), cache,
        )
        for model, cache in zip(models, caches, strict=True)
    )  # fmt: skip
    sums = torch.zeros(3, dtype=torch.float64)
    for part in slices(int(keep.sum()), vocabulary):
        reference = log_softmax(base_rows(part), dim=-1)
        other = log_softmax(new_rows(part), dim=-1).to(reference.device)
        kl = kl_div(other, reference, reduction="none", log_target=True).sum(dim=-1)  # [rows]
        agree = reference.argmax(dim=-1) == other.argmax(dim=-1)
        sums += torch.tensor([float(kl.double().sum()), float(agree.double().sum()), float(len(kl))], dtype=sums.dtype)
    return sums
