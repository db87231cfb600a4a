"""Perplexity of a language model on text, over windows of a stated length that advance by a stated stride.

With a stride as long as the window, windows do not overlap, and the first token of each is not scored. With a shorter
one, a window scores only what the one before it did not reach, each token after at least `context - stride` others.
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
    """Perplexity over the text, or over its first `limit` tokens. Without a stride the windows lie side by side.

    `kv` is the number format of the KV cache; without it, the one saved with the model."""
    stride = context if stride is None else stride
    check_positive(batch_size=batch_size, limit=limit)
    check_context(model, context, stride)
    cache = cache_in(model, kv)
    tokens = tokens_of(model, data, limit)
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


def cache_in(model: Model, kv: str | None) -> NewCache | None:
    """What makes a cache in a format, or in the one that the model remembers; None where they are not rounded."""
    held = model.kv if kv is None else KVCacheFormat(kv)
    if held is None:
        return None
    new = partial(held.cache, model.network.config)
    new()  # so that a name that does not exist is told before anything runs
    return new


def check_context(model: Model, context: int, stride: int) -> None:
    """Refuses windows that the model cannot take or that would skip text."""
    if model.task != "language":
        raise DataError(f"{model.source or 'This model'} is no language model ({model.task}): perplexity needs one.")
    if context < 2 or not 1 <= stride <= context:
        raise DataError(
            f"Context {context} and stride {stride} do not fit: expected 2 <= context and 1 <= stride <= context."
        )
    positions = getattr(model.network.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and context > positions:
        raise DataError(f"A context of {context:,} is longer than the model's {positions:,} positions: ask for less.")


def tokens_of(model: Model, data: TextData, limit: int | None) -> Tensor:
    """The text's first tokens, or all of them. [tokens]"""
    tokenizer: PreTrainedTokenizerBase | None = model.tokenizer
    if tokenizer is None:
        raise DataError(f"{model.source or 'This model'} has no tokenizer: text cannot be measured with it.")
    tokens = torch.tensor(tokenizer(data.joined, verbose=False)["input_ids"][:limit], dtype=torch.int64)
    if len(tokens) < 2:
        raise DataError(f"{data.name} has {len(tokens)} token(s) within the limit: perplexity needs at least two.")
    return tokens


def windows_over(tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Windows that together score every token once, but for those with nothing before them."""
    reached = 0
    for begin in range(0, tokens, stride):
        end = min(begin + context, tokens)
        scored_from = max(reached, begin + 1)
        if scored_from < end:
            yield Window(begin, end, scored_from)
        reached = end
        if end == tokens:
            return


def batched_windows(windows: list[Window], batch_size: int) -> Iterator[list[Window]]:
    """Windows in order, in groups of one length."""
    for _, alike in groupby(windows, key=lambda window: window.end - window.begin):
        group = list(alike)
        for start in range(0, len(group), batch_size):
            yield group[start : start + batch_size]


def window_inputs(tokens: Tensor, windows: list[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """The windows' tokens, and which of them are scored. Both [windows, length]"""
    input_ids = torch.stack([tokens[window.begin : window.end] for window in windows])
    places = torch.arange(input_ids.shape[1])
    scored = torch.stack([places >= window.scored_from - window.begin for window in windows])
    return input_ids.to(device), scored.to(device)


def _window_losses(model: Model, tokens: Tensor, windows: list[Window], cache: NewCache | None) -> list[float]:
    """The mean negative log-likelihood of each window."""
    input_ids, scored = window_inputs(tokens, windows, model.device)
    losses = token_losses(model.network, input_ids, torch.ones_like(input_ids), scored, cache)
    counts = [window.end - window.scored_from for window in windows]
    return [float(part.mean()) for part in losses.split(counts)]
