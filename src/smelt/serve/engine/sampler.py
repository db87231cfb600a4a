"""Sample tokens from logits: biases and penalties, then temperature, top-k, top-p and min-p, then one draw per row.

A draw inverts the cumulative distribution at a number that depends only on the request's seed and the token's position
in the output, so that other requests in the batch change nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.serve.engine.request import Request

BLOCK_SIZE = 256  # columns whose weights are summed first in a draw
NUM_CANDIDATES = 256  # most likely tokens that top-k and top-p look at first

_Sampler = Callable[[Tensor, list[Request]], Tensor]


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
    changed = sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words or request.matcher is not None
    return bool(changed) or sampling.penalized or len(request.output) < sampling.min_tokens


def _process_logits(logits: Tensor, request: Request, eos_token_ids: tuple[int, ...]) -> None:
    """Apply biases, penalties, min_tokens, allowed tokens, bad words and the grammar mask to logits [vocabulary] in
    place."""
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
        _ban(logits, [*eos_token_ids, *sampling.stop_token_ids])
    if sampling.bad_words:
        _ban(logits, [word[-1] for word in sampling.bad_words if _ends_with(request.output, word[:-1])])
    if sampling.allowed_token_ids:
        if request.allowed_tokens is None:
            request.allowed_tokens = torch.tensor(sampling.allowed_token_ids, device=device)
        values = logits[request.allowed_tokens]
        logits.fill_(-torch.inf)
        logits[request.allowed_tokens] = values
    if request.matcher is not None:
        logits[~request.matcher.token_mask().to(device)] = -torch.inf


def _ban(logits: Tensor, tokens: list[int]) -> None:
    known = [token for token in tokens if token < len(logits)]
    logits[torch.tensor(known, device=logits.device, dtype=torch.int64)] = -torch.inf


def _ends_with(output: list[int], tokens: tuple[int, ...]) -> bool:
    return not tokens or tuple(output[-len(tokens) :]) == tokens


def _sample_rows(logits: Tensor, requests: list[Request]) -> Tensor:
    """Sample one token per row; rows with temperature 0 take the most likely token.

    How a row is sampled depends on its own request alone. Tokens are sorted only for top-k and top-p.
    """
    groups: dict[_Sampler | None, list[int]] = {}
    for row, request in enumerate(requests):
        groups.setdefault(_sampler_for(request, logits), []).append(row)
    tokens = logits.argmax(-1) if None in groups or len(groups) > 1 else None
    for sampler, rows in groups.items():
        if sampler is None:
            continue
        chosen = [requests[row] for row in rows]
        if tokens is None:
            return sampler(logits, chosen)
        index = torch.tensor(rows, device=logits.device)
        tokens[index] = sampler(logits[index], chosen)
    assert tokens is not None
    return tokens


def _sampler_for(request: Request, logits: Tensor) -> _Sampler | None:
    """Return how to sample a row; None if it is greedy."""
    params, vocab_size = request.sampling, logits.shape[-1]
    if params.greedy:
        return None
    if params.top_p >= 1 and not params.top_k:
        return _sample_unsorted
    few = vocab_size > NUM_CANDIDATES
    if few and (0 < params.top_k <= NUM_CANDIDATES):
        return _sample_candidates
    # Whether the candidates suffice for top-p, only the device knows: waiting for it would cost more than sorting.
    return _sample_candidates if few and logits.device.type == "cpu" else _sample_sorted


def _sample_unsorted(logits: Tensor, requests: list[Request]) -> Tensor:
    """Draw in the order of the vocabulary."""
    probabilities = (logits / _temperatures(requests, logits)).softmax(-1)
    if any(request.sampling.min_p for request in requests):
        min_p = _column([request.sampling.min_p for request in requests], logits)
        probabilities[probabilities < min_p * probabilities.amax(-1, keepdim=True)] = 0.0
    return _draw(probabilities, requests)


def _sample_candidates(logits: Tensor, requests: list[Request]) -> Tensor:
    """Sort the most likely tokens; all of them in rows where top-p needs more."""
    scaled = logits / _temperatures(requests, logits)
    values, order = scaled.topk(NUM_CANDIDATES, dim=-1)
    probabilities = (values - scaled.logsumexp(-1, keepdim=True)).exp()
    tokens = order.gather(-1, _draw(_keep(probabilities, requests), requests)[:, None])[:, 0]
    if logits.device.type == "cpu":
        mass = probabilities.sum(-1).tolist()
        too_few = [row for row, request in enumerate(requests) if _needs_more(request, mass[row])]
        if too_few:
            tokens[too_few] = _sample_sorted(logits[too_few], [requests[row] for row in too_few])
    return tokens


def _needs_more(request: Request, mass: float) -> bool:
    params = request.sampling
    return not 0 < params.top_k <= NUM_CANDIDATES and mass < params.top_p


def _sample_sorted(logits: Tensor, requests: list[Request]) -> Tensor:
    sorted_logits, order = (logits / _temperatures(requests, logits)).sort(dim=-1, descending=True)
    index = _draw(_keep(sorted_logits.softmax(-1), requests), requests)
    return order.gather(-1, index[:, None])[:, 0]


def _keep(probabilities: Tensor, requests: list[Request]) -> Tensor:
    """Set sorted probabilities [rows, tokens] to 0 outside of top-k, top-p and min-p."""
    params = [request.sampling for request in requests]
    mass_above = probabilities.cumsum(-1) - probabilities  # of more likely tokens
    kept = mass_above < _column([each.top_p for each in params], probabilities)
    kept &= probabilities >= _column([each.min_p for each in params], probabilities) * probabilities[:, :1]
    top_k = _column([float(each.top_k or probabilities.shape[-1]) for each in params], probabilities)
    kept &= torch.arange(probabilities.shape[-1], device=probabilities.device) < top_k
    return torch.where(kept, probabilities, 0.0)


def _draw(weights: Tensor, requests: list[Request]) -> Tensor:
    """Return a column of each row of weights [rows, columns], drawn in proportion to them: first a block of columns by
    the sums of blocks, then a column of the block."""
    missing = -weights.shape[1] % BLOCK_SIZE
    padded = (F.pad(weights, (0, missing)) if missing else weights).unflatten(1, (-1, BLOCK_SIZE))
    block_sums = padded.sum(-1).double()
    uniform = _column([_uniform(request) for request in requests], block_sums)
    block, target = _invert(block_sums, uniform * block_sums.sum(-1, keepdim=True))
    columns = padded.take_along_dim(block[:, :, None], dim=1)[:, 0]
    return (block * BLOCK_SIZE + _invert(columns.double(), target)[0])[:, 0]


def _invert(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the running sum of each row exceeds its target [rows, 1], and the target less the sum before."""
    sums = weights.cumsum(-1)
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())  # of positive weight, for a target that was rounded up
    index = torch.minimum(torch.searchsorted(sums, target, right=True), last)
    return index, target - (sums - weights).gather(-1, index)


def _temperatures(requests: list[Request], like: Tensor) -> Tensor:
    return _column([request.sampling.temperature for request in requests], like)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


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
