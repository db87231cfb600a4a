"""Sampling: against a slow oracle, by frequencies, and independent of the rest of the batch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from smelt.serve.engine import sampler
from smelt.serve.engine.request import Request, RequestId
from smelt.serve.engine.sampler import sample
from smelt.serve.engine.sampling_params import SamplingParams

WORDS = 12


def request(prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), seed: int = 0, **more: Any) -> Request:
    return Request(RequestId("a"), list(prompt), SamplingParams(**more), 10**6, seed=seed, tokens=[*prompt, *output])


def token(logits: Tensor, sampled: Request, eos_token_ids: tuple[int, ...] = ()) -> int:
    return int(sample(logits[None], [sampled], eos_token_ids).tokens[0])


def allowed(logits: list[float], sampling: SamplingParams) -> dict[int, float]:
    """Compute by hand which tokens may be sampled and their probabilities."""
    largest = max(logits)
    weights = [math.exp((value - largest) / sampling.temperature) for value in logits]
    weight_sum = sum(weights)
    order = sorted(range(len(logits)), key=lambda index: -weights[index])
    kept, above = [], 0.0
    for rank, index in enumerate(order):
        share = weights[index] / weight_sum
        inside = above < sampling.top_p and share >= sampling.min_p * weights[order[0]] / weight_sum
        if rank == 0 or (inside and not (sampling.top_k and rank >= sampling.top_k)):
            kept.append(index)
        above += share
    total = sum(weights[index] for index in kept)
    return {index: weights[index] / total for index in kept}


@pytest.mark.parametrize(
    "params",
    [
        {}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.6},
        {"temperature": 3.0, "top_p": 0.9, "min_p": 0.05, "top_k": 9},
    ],
    ids=str,
)  # fmt: skip
def test_frequencies(params: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits, draws = torch.randn(WORDS) * 2, 6000
    rows = [request(seed=seed, **params) for seed in range(draws)]
    counts = Counter(sample(logits.expand(draws, -1), rows).tokens.tolist())
    expected = allowed(logits.tolist(), rows[0].sampling)
    assert set(counts) <= set(expected)
    for token_id, share in expected.items():
        assert abs(counts[token_id] / draws - share) < 4.5 * math.sqrt(share * (1 - share) / draws) + 1e-9


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=WORDS),
    st.floats(0.1, 5),
    st.integers(0, 6),
    st.floats(0.05, 1),
    st.floats(0, 0.9),
    st.integers(0, 99),
)
def test_no_disallowed_token_is_sampled(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    sampled_request = request(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sampled = token(torch.tensor(values), sampled_request)
    inside = allowed(values, sampled_request.sampling)
    # At the edge of top-p or min-p, float32 and float64 may differ; the token then counts as allowed.
    near = {index for index in range(len(values)) if any(abs(values[index] - values[other]) < 1e-4 for other in inside)}
    wide = allowed(
        values, SamplingParams(temperature=temperature, top_k=top_k, top_p=min(1, top_p + 1e-4), min_p=min_p * 0.999)
    )
    assert sampled in inside or sampled in near or sampled in wide


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, WORDS)
    rows = [request(temperature=0), request(seed=5), request(temperature=0)]
    result = sample(logits, rows).tokens.tolist()
    assert result[0] == int(logits[0].argmax()) and result[2] == int(logits[2].argmax())
    assert result[1] == token(logits[1], rows[1])


def test_only_position_and_seed_determine_the_sample() -> None:
    logits = torch.zeros(1000)
    first = [token(logits, request(output=(1,) * position, seed=3)) for position in range(20)]
    assert len(set(first)) > 15  # every position has its own random number
    assert first == [token(logits, request((5, 6), output=(1,) * position, seed=3)) for position in range(20)]
    assert first != [token(logits, request(output=(1,) * position, seed=4)) for position in range(20)]


def test_logit_bias_and_penalties() -> None:
    logits = torch.tensor([3.0, 2.9, -1.0, 0.0])
    assert token(logits, request(temperature=0)) == 0
    assert token(logits, request(temperature=0, logit_bias={3: 5.0, 999: 1.0})) == 3
    assert token(logits, request(temperature=0, presence_penalty=0.5, output=(0,))) == 1
    assert token(logits, request(temperature=0, presence_penalty=0.5)) == 0  # the prompt does not count
    assert token(logits, request(temperature=0, frequency_penalty=0.06, output=(0,))) == 0
    assert token(logits, request(temperature=0, frequency_penalty=0.06, output=(0, 0))) == 1
    assert token(logits, request((0,), temperature=0, repetition_penalty=1.1)) == 1  # here it does
    negative = torch.tensor([-1.0, -1.1])
    assert token(negative, request((0,), temperature=0, repetition_penalty=1.2)) == 1


def test_a_bias_beyond_the_vocabulary_is_ignored() -> None:
    """The tokenizer may have tokens that the network has no logits for."""
    assert token(torch.arange(WORDS).float(), request(temperature=0, logit_bias={WORDS: 100.0})) == WORDS - 1


def test_a_random_number_that_is_rounded_up_to_one_samples_the_last_kept_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_uniform", lambda _: 1.0)
    assert token(torch.arange(WORDS).float(), request(top_k=3)) == WORDS - 3


def test_eos_is_banned_before_min_tokens() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    assert token(logits, request(temperature=0, min_tokens=1), eos_token_ids=(0,)) == 1
    assert token(logits, request(temperature=0, min_tokens=1, stop_token_ids=(1,)), eos_token_ids=(0,)) == 2
    assert token(logits, request(temperature=0, min_tokens=1, output=(2,)), eos_token_ids=(0,)) == 0


def test_logprobs_use_the_unmodified_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    sampled = sample(logits, [request(temperature=0, logprobs=2, logit_bias={0: 50.0})])
    logprobs = sampled.logprobs(0, 2)
    assert int(sampled.tokens[0]) == 0
    assert logprobs.own == pytest.approx(float(logits[0].log_softmax(-1)[0]))
    assert [pair[0] for pair in logprobs.top] == [2, 1]


@pytest.mark.parametrize(
    "params", [{"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.95, "min_p": 0.02}, {"top_k": 200, "top_p": 0.8}], ids=str
)
def test_a_few_sorted_candidates_give_the_tokens_of_sorting_all(params: dict[str, Any]) -> None:
    torch.manual_seed(1)
    logits = torch.randn(400, 5000) * 4
    rows = [request(seed=seed, **params) for seed in range(400)]
    assert all(sampler._sampler_for(row, logits) is sampler._sample_candidates for row in rows)
    assert torch.equal(sampler._sample_candidates(logits, rows), sampler._sample_sorted(logits, rows))


def test_all_tokens_are_sorted_where_candidates_do_not_reach_top_p() -> None:
    logits = torch.zeros(300, 5000)  # every token is as likely: 0.9 needs 4,500 of them
    rows = [request(seed=seed, top_p=0.9) for seed in range(300)]
    tokens = sample(logits, rows).tokens
    assert torch.equal(tokens, sampler._sample_sorted(logits, rows))
    assert len(set(tokens.tolist())) > 250


def test_nothing_is_sorted_without_top_k_and_top_p(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sort", "topk"):
        monkeypatch.setattr(Tensor, name, None)
    logits = torch.randn(3, 5000)
    sample(logits, [request(), request(temperature=0.3, min_p=0.1), request(temperature=0)])


def test_each_row_is_sampled_as_if_it_were_alone() -> None:
    torch.manual_seed(2)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 9}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 900}]
    logits = torch.randn(60, 2000) * 3
    rows = [request(seed=seed, **kinds[seed % len(kinds)]) for seed in range(60)]
    alone = [token(logits[row], rows[row]) for row in range(60)]
    assert sample(logits, rows).tokens.tolist() == alone
