"""Log-probabilities of prompt tokens: which rows of a step need logits for them, and what those say.

A prompt whose log-probabilities are wanted is computed from its first token on, in chunks of at most
`MAX_PROMPT_LOGITS` tokens over all requests of a step, so that logits never take more memory than that many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.serve.engine.request import Request
from smelt.serve.engine.scheduler import ScheduledChunk

SLICE_ROWS = 32  # of logits whose log-softmax is computed at once

LogitsOf = Callable[[slice], Tensor]  # rows -> logits [rows, vocabulary]


@dataclass(frozen=True)
class PromptLogprob:
    """Log-probability of a prompt token given those before it, its rank from 1 on, and the most likely tokens."""

    own: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class PromptChunkLogprobs:
    """Log-probabilities of the prompt tokens of a request from position `first` on, still on the device."""

    request: Request
    first: int
    own: Tensor  # [tokens]
    ranks: Tensor  # [tokens]
    top_values: Tensor  # [tokens, prompt_logprobs]
    top_tokens: Tensor

    def read(self) -> list[PromptLogprob]:
        """Copy to the host."""
        tops = zip(self.top_tokens.tolist(), self.top_values.tolist(), strict=True)
        return [
            PromptLogprob(own, rank, tuple(zip(tokens, values, strict=True)))
            for own, rank, (tokens, values) in zip(self.own.tolist(), self.ranks.tolist(), tops, strict=True)
        ]


def num_prompt_logits(chunk: ScheduledChunk) -> int:
    """Return how many tokens of a chunk precede a prompt token whose log-probability is wanted."""
    if not chunk.request.wants_prompt_logits:
        return 0
    return max(min(chunk.start + chunk.count, len(chunk.request.prompt) - 1) - chunk.start, 0)


def prompt_logits_indices(chunks: Sequence[ScheduledChunk]) -> list[int]:
    """Return the rows of a step's tokens whose logits give log-probabilities of prompts."""
    rows: list[int] = []
    offset = 0
    for chunk in chunks:
        rows += range(offset, offset + num_prompt_logits(chunk))
        offset += chunk.count
    return rows


def compute_prompt_logprobs(chunks: Sequence[ScheduledChunk], logits_of: LogitsOf) -> list[PromptChunkLogprobs]:
    """Compute log-probabilities from the logits of `prompt_logits_indices`, a slice of rows at a time."""
    results, offset = [], 0
    for chunk in chunks:
        count = num_prompt_logits(chunk)
        if count:
            parts = list(_slices(chunk, count, lambda rows, offset=offset: logits_of(_shift(rows, offset))))  # type: ignore[misc]
            own, ranks, values, tokens = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            results.append(PromptChunkLogprobs(chunk.request, chunk.start + 1, own, ranks, values, tokens))
        offset += count
    return results


def _slices(chunk: ScheduledChunk, count: int, logits_of: LogitsOf) -> Iterator[tuple[Tensor, ...]]:
    """Yield log-probabilities, ranks, and values and tokens of the most likely, slice after slice of a chunk."""
    num_top = chunk.request.sampling.prompt_logprobs or 0
    for start in range(0, count, SLICE_ROWS):
        stop = min(start + SLICE_ROWS, count)
        logprobs = logits_of(slice(start, stop)).float().log_softmax(-1)
        targets = chunk.request.prompt[chunk.start + start + 1 : chunk.start + stop + 1]
        own = logprobs.gather(-1, torch.tensor(targets, device=logprobs.device)[:, None])
        ranks = (logprobs >= own).sum(-1)
        values, tokens = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
        yield own[:, 0], ranks, values, tokens


def _shift(rows: slice, offset: int) -> slice:
    return slice(rows.start + offset, rows.stop + offset)
