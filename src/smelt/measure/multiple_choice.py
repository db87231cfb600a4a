"""Multiple choice: a language model picks the option with the highest likelihood after its context.

Longer options are less likely. One pass gives the accuracy under four normalizations of the log-likelihood: none (`acc`
in lm-eval, and the default), by the option's characters (`acc_norm`), UTF-8 bytes (`acc_bytes`) or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from smelt.data.batches import check_positive, pad_batch, padding_token_id
from smelt.data.multiple_choice import MultipleChoiceData
from smelt.errors import DataError
from smelt.measure.eval_result import EvalResult
from smelt.measure.logits import eval_mode, token_losses
from smelt.measure.perplexity import cache_factory
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress

NORMALIZATIONS = ("none", "characters", "bytes", "tokens")


@dataclass(frozen=True)
class Option:
    """Tokens of a context and one continuation; those from `scored_from` on are scored."""

    tokens: list[int]
    scored_from: int
    continuation: str


def evaluate_multiple_choice(
    model: Model,
    data: MultipleChoiceData,
    *,
    normalize: str = "none",
    batch_size: int = 16,
    limit: int | None = None,
    progress: Progress = NullProgress(),  # noqa: B008
) -> EvalResult:
    """Return the accuracy: the fraction of (the first `limit`) items whose correct option is the most likely.

    Predictions and the value are those of `normalize`; `by_normalization` holds the accuracy under each.
    """
    check_normalization(normalize)
    if model.task != "language" or model.tokenizer is None:
        raise DataError(
            f"{model.source or 'This model'} ({model.task}) cannot score options: a language model is required."
        )
    check_positive(batch_size=batch_size, limit=limit)
    items = data.items[:limit]
    positions = getattr(model.network.config.get_text_config(), "max_position_embeddings", None)
    options = [
        _option(model.tokenizer, context, continuation, positions)
        for item in items
        for context, continuation in zip(item.contexts, item.continuations, strict=True)
    ]
    likelihoods = _likelihoods(model, options, batch_size, progress)
    ends = np.cumsum([len(item.contexts) for item in items])
    predictions = {name: _most_likely(likelihoods / _lengths(options, name), ends) for name in NORMALIZATIONS}
    labels = np.array([item.gold for item in items])
    correct = (predictions[normalize] == labels).astype(np.float64)
    return EvalResult(
        metric="accuracy",
        value=float(correct.mean()),
        higher_is_better=True,
        data=data.name,
        items=correct,
        predictions=predictions[normalize],
        labels=labels,
        settings={"normalize": normalize, "items": len(items)},
        finite=bool(np.isfinite(likelihoods).all()),
        by_normalization={name: float((guesses == labels).mean()) for name, guesses in predictions.items()},
    )


def check_normalization(name: str) -> None:
    """Raise if there is no such normalization."""
    if name not in NORMALIZATIONS:
        raise DataError(f"There is no normalization '{name}': expected one of {', '.join(NORMALIZATIONS)}.")


def _most_likely(scores: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the option of each item with the highest score; the first of equals. [items]"""
    return np.array([int(part.argmax()) for part in np.split(scores, ends[:-1])])


def _option(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, positions: int | None) -> Option:
    """Tokenize context and continuation, separated by a space; contexts that are too long lose their beginning."""
    text = context if context[-1:].isspace() or continuation[:1].isspace() else context + " "
    tokens = list(tokenizer(text + continuation, verbose=False)["input_ids"])
    context_tokens = tokenizer(context, verbose=False)["input_ids"]
    # A tokenizer may merge across the boundary: the continuation starts at the first token that differs.
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(context_tokens, tokens, strict=False)))
    dropped = max(0, len(tokens) - positions) if positions is not None else 0
    # At least one token is scored, but never the first, which has no context.
    return Option(tokens[dropped:], max(1, min(shared, len(tokens) - 1) - dropped), continuation)


def _likelihoods(model: Model, options: list[Option], batch_size: int, progress: Progress) -> np.ndarray:
    """Return the log-likelihood of each option. [options]"""
    order = sorted(range(len(options)), key=lambda option: len(options[option].tokens))
    likelihoods = np.zeros(len(options))
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    with eval_mode(model.network):
        for group in progress.track(groups, "multiple choice"):
            likelihoods[group] = _batch_likelihoods(model, [options[index] for index in group])
    return likelihoods


def _batch_likelihoods(model: Model, options: list[Option]) -> list[float]:
    assert model.tokenizer is not None
    rows = [option.tokens for option in options]
    encoded = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    batch = pad_batch(encoded, padding_token_id(model.tokenizer))  # [options, longest]
    starts = torch.tensor([[option.scored_from] for option in options])
    scored = (torch.arange(batch["input_ids"].shape[1]) >= starts) & (batch["attention_mask"] == 1)
    device = model.device
    ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
    losses = token_losses(model.network, ids, mask, scored.to(device), cache_factory(model, None))
    return [-float(part.sum()) for part in losses.split(scored.sum(dim=1).tolist())]


def _lengths(options: list[Option], normalize: str) -> np.ndarray:
    if normalize == "none":
        return np.ones(len(options))
    if normalize == "characters":
        return np.array([len(option.continuation) for option in options])
    if normalize == "bytes":
        return np.array([len(option.continuation.encode()) for option in options])
    return np.array([len(option.tokens) - option.scored_from for option in options])
