"""Perplexity of a language model on text, over sliding windows of a fixed length and stride.

With a stride equal to the window length, windows do not overlap and the first token of each is not scored. With a
shorter stride, a window scores only the tokens after the previous window, each with at least `context - stride` tokens
of context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smelt.data.batches import check_positive
from smelt.data.text import TextData
from smelt.errors import DataError
from smelt.measure.eval_result import EvalResult
from smelt.measure.logits import NewCache, eval_mode, token_losses
from smelt.models.kv_cache import KVCacheFormat
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress


@dataclass(frozen=True)
class Window:
    """Tokens from `begin` to `end`, of which those from `scored_from` on are scored."""

    begin: int
    end: int
    scored_from: int


def perplexity(
    model: Model,
    data: TextData,
    *,
    context: int = 1024,
    stride: int | None = None,
    batch_size: int = 1,
    limit: int | None = None,
    kv: str | None = None,
    progress: Progress = NullProgress(),  # noqa: B008
) -> EvalResult:
    """Compute the perplexity of the text or its first `limit` tokens; without a stride windows do not overlap.

    `kv` is the number format of the KV cache; by default the one saved with the model.
    """
    stride = context if stride is None else stride
    check_positive(batch_size=batch_size, limit=limit)
    check_context(model, context, stride)
    cache = cache_factory(model, kv)
    tokens = tokenize(model, data, limit)
    windows = list(windows_over(len(tokens), context, stride))
    losses: list[float] = []
    with eval_mode(model.network):
        for group in progress.track(list(batched_windows(windows, batch_size)), "perplexity"):
            losses.extend(_window_losses(model, tokens, group, cache))
    items = np.array(losses)
    weights = np.array([window.end - window.scored_from for window in windows], dtype=np.float64)
    return EvalResult(
        metric="perplexity",
        value=float(np.exp(np.average(items, weights=weights))),
        higher_is_better=False,
        data=data.name,
        items=items,
        weights=weights,
        settings={"context": context, "stride": stride, "tokens_scored": int(weights.sum()), "windows": len(windows)},
    )


def cache_factory(model: Model, kv: str | None) -> NewCache | None:
    """Return a factory of KV caches in format `kv` or the model's own; None if the KV cache is not quantized."""
    kv_format = model.kv if kv is None else KVCacheFormat(kv)
    if kv_format is None:
        return None
    new_cache = partial(kv_format.cache, model.network.config)
    new_cache()  # raises early if the format does not exist
    return new_cache


def check_context(model: Model, context: int, stride: int) -> None:
    """Raise if windows exceed the model's context or would skip text."""
    if model.task != "language":
        raise DataError(f"{model.source or 'This model'} is not a language model ({model.task}): perplexity needs one.")
    if context < 2 or not 1 <= stride <= context:
        raise DataError(
            f"Context {context} and stride {stride} do not fit: expected 2 <= context and 1 <= stride <= context."
        )
    positions = getattr(model.network.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and context > positions:
        raise DataError(
            f"A context of {context:,} is longer than the model's {positions:,} positions: use a shorter one."
        )


def tokenize(model: Model, data: TextData, limit: int | None) -> Tensor:
    """Tokenize the text and return its first `limit` tokens, or all. [tokens]"""
    tokenizer: PreTrainedTokenizerBase | None = model.tokenizer
    if tokenizer is None:
        raise DataError(f"{model.source or 'This model'} has no tokenizer: it cannot be evaluated on text.")
    tokens = torch.tensor(tokenizer(data.joined, verbose=False)["input_ids"][:limit], dtype=torch.int64)
    if len(tokens) < 2:
        raise DataError(f"{data.name} has {len(tokens)} token(s) within the limit: perplexity needs at least two.")
    return tokens


def windows_over(tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Yield windows that together score every token with context exactly once."""
    scored_to = 0
    for begin in range(0, tokens, stride):
        end = min(begin + context, tokens)
        scored_from = max(scored_to, begin + 1)
        if scored_from < end:
            yield Window(begin, end, scored_from)
        scored_to = end
        if end == tokens:
            return


def batched_windows(windows: list[Window], batch_size: int) -> Iterator[list[Window]]:
    """Yield batches of windows of equal length, in order."""
    for _, same_length in groupby(windows, key=lambda window: window.end - window.begin):
        group = list(same_length)
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


def window_inputs(tokens: Tensor, windows: list[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of the windows and the mask of scored ones. Both [windows, length]"""
    input_ids = torch.stack([tokens[window.begin : window.end] for window in windows])
    positions = torch.arange(input_ids.shape[1])
    scored = torch.stack([positions >= window.scored_from - window.begin for window in windows])
    return input_ids.to(device), scored.to(device)


def _window_losses(model: Model, tokens: Tensor, windows: list[Window], cache: NewCache | None) -> list[float]:
    """Return the mean negative log-likelihood of each window."""
    input_ids, scored = window_inputs(tokens, windows, model.device)
    losses = token_losses(model.network, input_ids, torch.ones_like(input_ids), scored, cache)
    counts = [window.end - window.scored_from for window in windows]
    return [float(part.mean()) for part in losses.split(counts)]
