"""Measure how many tokens each head retains of real prompts, sample by sample: the input of a profile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from smelt.errors import DataError
from smelt.kvcache.eviction.budget import BudgetRule, check_keep
from smelt.kvcache.eviction.prefill import RecordedPrefill, record_prefill
from smelt.kvcache.eviction.profile import retained_ratios
from smelt.kvcache.eviction.reconstruction import record_reconstruction
from smelt.kvcache.eviction.scorer import Scorer
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress

REPEAT_PROMPT = "\nRepeat the previous context exactly.\n"  # for scorers that need a reconstruction


def sample_prompts(tokens: Sequence[int], count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Sample `count` prompts of `length` tokens from a text."""
    if len(tokens) < length:
        raise DataError(
            f"the data has {len(tokens):,} tokens; a sample has {length:,}: give more, or a smaller length."
        )
    rng = random.Random(seed)
    starts = sorted(rng.randrange(len(tokens) - length + 1) for _ in range(count))
    return [list(tokens[start : start + length]) for start in starts]


def prefill_for(model: Model, prompt: Sequence[int], scorer: Scorer) -> RecordedPrefill:
    """Prefill a prompt and record all inputs that the scorer needs."""
    ids = torch.tensor([list(prompt)], device=model.device)
    prefill = record_prefill(model, ids)
    if not scorer.needs_reconstruction:
        return prefill
    if model.tokenizer is None:
        raise DataError(f"{scorer.name} asks the model to repeat its prompt, for which it needs a tokenizer.")
    request = torch.tensor(model.tokenizer(REPEAT_PROMPT)["input_ids"], device=model.device)
    return record_reconstruction(model, prefill, ids, request)


def score_layers(prefill: RecordedPrefill, scorer: Scorer) -> Tensor:  # [layers, batch, kv_heads, tokens]
    return torch.stack([scorer.scores(inputs) for inputs in prefill.layers])


def measure_kept_ratios(
    model: Model,
    prompts: Sequence[Sequence[int]],
    scorer: Scorer,
    rule: BudgetRule,
    keep: float,
    progress: Progress | None = None,
) -> Tensor:
    """Measure the ratio of evictable tokens that each head retains: [samples, layers, kv_heads]."""
    check_keep(keep)
    ratios = []
    for prompt in (progress or NullProgress()).track(prompts, "prompts"):
        _check_length(model, len(prompt), scorer, keep)
        prefill = prefill_for(model, prompt, scorer)
        counts = rule.counts(score_layers(prefill, scorer), keep)[:, 0]
        ratios.append(retained_ratios(counts, prefill.seq_len, scorer.sink, scorer.window))
    return torch.stack(ratios)


def _check_length(model: Model, tokens: int, scorer: Scorer, keep: float) -> None:
    max_positions = getattr(model.network.config, "max_position_embeddings", None)
    if max_positions is not None and tokens > max_positions:
        raise DataError(f"{tokens:,} tokens are more than the model's {max_positions:,} positions: take shorter texts.")
    always, retained = scorer.sink + scorer.window, int(tokens * keep)
    if retained <= always:
        raise DataError(
            f"of {tokens:,} tokens {keep:g} are {retained:,}, and {scorer.name} always keeps {always:,}: "
            "take longer texts, or keep more."
        )
