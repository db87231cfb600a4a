"""Sample tokens from logits: biases and penalties, then temperature, top-k, top-p and min-p, then one draw per row.

A draw inverts the cumulative distribution at a number that depends only on the request's seed and the token's position
in the output, so that other requests in the batch change nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from smelt.serve.engine.request import Request


@dataclass(frozen=True)
class Logprobs:
    """Log-probability of one token, and those of the most likely tokens."""

    own: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled tokens of a step, one row per request."""

    tokens: Tensor  # [rows], int64
    own: Tensor | None = None  # [rows]: log-probabilities, if any request wants them
    top_values: Tensor | None = None  # [rows, max requested logprobs]
    top_tokens: Tensor | None = None

    def logprobs(self, row: int, count: int) -> Logprobs:
        assert self.own is not None and self.top_tokens is not None and self.top_values is not None
        pairs = zip(self.top_tokens[row, :count].tolist(), self.top_values[row, :count].tolist(), strict=True)
        return Logprobs(float(self.own[row]), tuple(pairs))


@torch.no_grad()
def sample(logits: Tensor, requests: list[Request], eos_token_ids: tuple[int, ...] = ()) -> SamplerOutput:
    """Sample one token per row of logits [rows, vocabulary]. `eos_token_ids` are the model's EOS tokens."""
    raw = logits.float()
    processed = raw
    if any(_needs_processing(request) for request in requests):
        processed = raw.clone()
        for row, request in enumerate(requests):
            _process_logits(processed[row], request, eos_token_ids)
    if all(request.sampling.greedy for request in requests):
        tokens = processed.argmax(-1)
    else:
        tokens = _sample_rows(processed, requests)
    return _with_logprobs(raw, tokens, requests)


def _needs_processing(request: Request) -> bool:
    sampling = request.sampling
    structured = request.matcher is not None
    return structured or sampling.penalized or bool(sampling.logit_bias) or len(request.output) < sampling.min_tokens


def _process_logits(logits: Tensor, request: Request, eos_token_ids: tuple[int, ...]) -> None:
    """Apply biases, penalties, min_tokens and the grammar mask to logits [vocabulary] in place."""
    sampling, device = request.sampling, logits.device
    bias = {token: value for token, value in sampling.logit_bias.items() if token < len(logits)}
    if bias:
        logits[torch.tensor(list(bias), device=device)] += torch.tensor(list(bias.values()), device=device)
    if sampling.repetition_penalty != 1:
        token_ids = torch.tensor(sorted(set(request.tokens)), device=device)
        values = logits[token_ids]
        logits[token_ids] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    if (sampling.presence_penalty or sampling.frequency_penalty) and request.output:
        output_ids, counts = torch.tensor(request.output, device=device).unique(return_counts=True)
        logits[output_ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if len(request.output) < sampling.min_tokens:
        banned = [token for token in (*eos_token_ids, *sampling.stop_token_ids) if token < len(logits)]
        logits[torch.tensor(banned, device=device, dtype=torch.int64)] = -torch.inf
    if request.matcher is not None:
        logits[~request.matcher.token_mask().to(device)] = -torch.inf


def _sample_rows(logits: Tensor, requests: list[Request]) -> Tensor:
    """Sample one token per row; rows with temperature 0 take the most likely token."""
    device = logits.device

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    sampling_params = [request.sampling for request in requests]
    temperature = column([1.0 if params.greedy else params.temperature for params in sampling_params])
    sorted_logits, order = (logits / temperature).sort(dim=-1, descending=True)
    probabilities = sorted_logits.softmax(-1)
    rank = torch.arange(logits.shape[-1], device=device)
    mass_above = probabilities.cumsum(-1) - probabilities  # of more likely tokens
    kept = mass_above < column([params.top_p for params in sampling_params])
    kept &= probabilities >= column([params.min_p for params in sampling_params]) * probabilities[:, :1]
    kept &= rank < column(
        [1 if params.greedy else params.top_k or logits.shape[-1] for params in sampling_params], torch.int64
    )
    kept[:, 0] = True
    sums = torch.where(kept, probabilities, 0.0).double().cumsum(-1)
    target = column([_uniform(request) for request in requests], torch.float64) * sums[:, -1:]
    index = (sums <= target).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    last = kept.sum(-1, keepdim=True) - 1  # kept tokens come first: clamp a target that was rounded up
    return order.gather(-1, torch.minimum(index, last))[:, 0]


def _uniform(request: Request) -> float:
    """Return a number in [0, 1) from the seed and the position in the output."""
    position = request.num_expected_tokens - len(request.prompt)
    digest = hashlib.blake2b(f"{request.seed} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def _with_logprobs(raw: Tensor, tokens: Tensor, requests: list[Request]) -> SamplerOutput:
    counts = [request.sampling.logprobs for request in requests if request.sampling.logprobs is not None]
    if not counts:
        return SamplerOutput(tokens)
    logprobs = raw.log_softmax(-1)
    own = logprobs.gather(-1, tokens[:, None])[:, 0]
    top_values, top_tokens = logprobs.topk(min(max(counts), raw.shape[-1]), dim=-1)
    return SamplerOutput(tokens, own, top_values, top_tokens)
