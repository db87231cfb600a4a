"""What each head keeps of real prompts, sample by sample: what a profile is made of."""

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

REPEAT = "\nRepeat the previous context exactly.\n"  # what a scorer that repeats the prompt asks with


def sample_prompts(tokens: Sequence[int], count: int, length: int, seed: int = 0) -> list[list[int]]:
    """So many pieces of a text, from anywhere in it."""
    if len(tokens) < length:
        raise DataError(
            f"the data has {len(tokens):,} tokens; a sample has {length:,}: give more, or a smaller length."
        )
    chance = random.Random(seed)
    starts = sorted(chance.randrange(len(tokens) - length + 1) for _ in range(count))
    return [list(tokens[start : start + length]) for start in starts]


def prefill_for(model: Model, prompt: Sequence[int], scorer: Scorer) -> RecordedPrefill:
    """With all that the scorer looks at."""
    ids = torch.tensor([list(prompt)], device=model.device)
    found = record_prefill(model, ids)
    if not scorer.needs_reconstruction:
        return found
    if model.tokenizer is None:
        raise DataError(f"{scorer.name} asks the model to repeat its prompt, for which it needs a tokenizer.")
    return record_reconstruction(
        model, found, ids, torch.tensor(model.tokenizer(REPEAT)["input_ids"], device=model.device)
    )


def score_layers(reading: RecordedPrefill, scorer: Scorer) -> Tensor:  # [layers, batch, kv_heads, tokens]
    return torch.stack([scorer.scores(seen) for seen in reading.layers])


def measure_kept_ratios(
    model: Model,
    prompts: Sequence[Sequence[int]],
    scorer: Scorer,
    rule: BudgetRule,
    keep: float,
    progress: Progress | None = None,
) -> Tensor:
    """The share that each head keeps of what may go, [samples, layers, kv_heads]."""
    check_keep(keep)
    found = []
    for prompt in (progress or NullProgress()).track(prompts, "prompts"):
        _check_room(model, len(prompt), scorer, keep)
        reading = prefill_for(model, prompt, scorer)
        counts = rule.counts(score_layers(reading, scorer), keep)[:, 0]
        found.append(retained_ratios(counts, reading.seq_len, scorer.sink, scorer.window))
    return torch.stack(found)


def _check_room(model: Model, tokens: int, scorer: Scorer, keep: float) -> None:
    most = getattr(model.network.config, "max_position_embeddings", None)
    if most is not None and tokens > most:
        raise DataError(f"{tokens:,} tokens are more than the model's {most:,} positions: take shorter texts.")
    always, left = scorer.sink + scorer.window, int(tokens * keep)
    if left <= always:
        raise DataError(
            f"of {tokens:,} tokens {keep:g} are {left:,}, and {scorer.name} keeps {always:,} in any case: "
            "take longer texts, or keep more."
        )
