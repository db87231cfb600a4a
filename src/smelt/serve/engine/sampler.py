"""From logits to tokens: biases and penalties, then temperature, top-k, top-p and min-p, then one draw a row.

A draw inverts the cumulative distribution at a number that depends on the request's seed and the place of the token in
its answer alone, so that neighbours in a batch change nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.serve.engine.request import Request


@dataclass(frozen=True)
class Logprobs:
    """Of one token: its own log-probability, and the most likely tokens with theirs."""

    own: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SamplerOutput:
    """What a step gave, a row a request."""

    tokens: Tensor  # [rows], int64
    own: Tensor | None = None  # [rows]: log-probabilities, where anyone asked
    top_values: Tensor | None = None  # [rows, most asked for]
    top_tokens: Tensor | None = None

    def logprobs(self, row: int, count: int) -> Logprobs:
        assert self.own is not None and self.top_tokens is not None and self.top_values is not None
        pairs = zip(self.top_tokens[row, :count].tolist(), self.top_values[row, :count].tolist(), strict=True)
        return Logprobs(float(self.own[row]), tuple(pairs))


@torch.no_grad()
def sample(logits: Tensor, requests: list[Request], ends: tuple[int, ...] = ()) -> SamplerOutput:
    """One token for every row of the logits [rows, vocabulary]. `ends` are the model's own ends of text."""
    raw = logits.float()
    changed = raw
    if any(_changes(request) for request in requests):
        changed = raw.clone()
        for row, request in enumerate(requests):
            _change(changed[row], request, ends)
    if all(request.sampling.greedy for request in requests):
        tokens = changed.argmax(-1)
    else:
        tokens = _sampled(changed, requests)
    return _with_logprobs(raw, tokens, requests)


def _changes(request: Request) -> bool:
    sampling = request.sampling
    formed = request.matcher is not None
    return formed or sampling.penalized or bool(sampling.logit_bias) or len(request.output) < sampling.min_tokens


def _change(logits: Tensor, request: Request, ends: tuple[int, ...]) -> None:
    """Biases, penalties, ends that may not come yet, and what the form forbids, in place. [vocabulary]"""
    sampling, device = request.sampling, logits.device
    known = {token: value for token, value in sampling.logit_bias.items() if token < len(logits)}
    if known:
        logits[torch.tensor(list(known), device=device)] += torch.tensor(list(known.values()), device=device)
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(request.tokens)), device=device)
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if (sampling.presence_penalty or sampling.frequency_penalty) and request.output:
        used, counts = torch.tensor(request.output, device=device).unique(return_counts=True)
        logits[used] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if len(request.output) < sampling.min_tokens:
        banned = [token for token in (*ends, *sampling.stop_token_ids) if token < len(logits)]
        logits[torch.tensor(banned, device=device, dtype=torch.int64)] = -torch.inf
    if request.matcher is not None:
        logits[~request.matcher.allowed().to(device)] = -torch.inf


def _sampled(logits: Tensor, requests: list[Request]) -> Tensor:
    """Rows with temperature 0 take the most likely token."""
    device = logits.device

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    settings = [request.sampling for request in requests]
    temperature = column([1.0 if each.greedy else each.temperature for each in settings])
    ranked, order = (logits / temperature).sort(dim=-1, descending=True)
    probabilities = ranked.softmax(-1)
    place = torch.arange(logits.shape[-1], device=device)
    before = probabilities.cumsum(-1) - probabilities  # what lies above each token
    kept = before < column([each.top_p for each in settings])
    kept &= probabilities >= column([each.min_p for each in settings]) * probabilities[:, :1]
    kept &= place < column([1 if each.greedy else each.top_k or logits.shape[-1] for each in settings], torch.int64)
    kept[:, 0] = True
    sums = torch.where(kept, probabilities, 0.0).double().cumsum(-1)
    target = column([_uniform(request) for request in requests], torch.float64) * sums[:, -1:]
    chosen = (sums <= target).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    last = kept.sum(-1, keepdim=True) - 1  # kept tokens come first: a target that was rounded up takes the last of them
    return order.gather(-1, torch.minimum(chosen, last))[:, 0]


def _uniform(request: Request) -> float:
    """Between 0 and 1, from the seed and the place in the answer."""
    place = request.num_expected_tokens - len(request.prompt)
    digest = hashlib.blake2b(f"{request.seed} {place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _with_logprobs(raw: Tensor, tokens: Tensor, requests: list[Request]) -> SamplerOutput:
    asked = [request.sampling.logprobs for request in requests if request.sampling.logprobs is not None]
    if not asked:
        return SamplerOutput(tokens)
    logprobs = raw.log_softmax(-1)
    own = logprobs.gather(-1, tokens[:, None])[:, 0]
    top_values, top_tokens = logprobs.topk(min(max(asked), raw.shape[-1]), dim=-1)
    return SamplerOutput(tokens, own, top_values, top_tokens)
