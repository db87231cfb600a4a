"""Scorers against their formulas written as loops, and their invariances."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from smelt.errors import ConfigError, ModelError
from smelt.kvcache.eviction.scorer import AttentionInputs, Scorer
from smelt.kvcache.eviction.scorers import SCORERS, Knorm, make_scorer
from smelt.registry import Registry

BATCH, HEADS, GROUP, TOKENS, WIDTH = 2, 2, 3, 29, 8
SCALE = 0.4  # not 1 / sqrt(head_dim), so that a scorer must use the given scale
NAMES = ("streaming", "knorm", "keydiff", "tova", "snapkv", "expected", "kvzip")


def turn(vectors: Tensor, first: int) -> Tensor:
    """Apply RoPE: rotate components i and i + half by position / 50^(2i / head_dim)."""
    half = vectors.shape[-1] // 2
    positions = torch.arange(first, first + vectors.shape[-2], dtype=torch.float64)
    angles = positions[:, None] / 50.0 ** (torch.arange(half) / half)
    cosine, sine = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
    left, right = vectors[..., :half], vectors[..., half:]
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


def seen_of(tokens: int = TOKENS, seed: int = 0) -> AttentionInputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return torch.randn(BATCH, heads, tokens, WIDTH, generator=generator)

    offset = torch.randn(BATCH, HEADS * GROUP, 1, WIDTH, generator=generator)
    reconstruction = torch.rand(BATCH, HEADS, tokens, generator=generator)
    return AttentionInputs(
        turn(normal(HEADS), 0), normal(HEADS), normal(HEADS * GROUP) + offset, turn, SCALE, reconstruction
    )


def by_loop(tokens: int, score: Callable[[int, int, int], float]) -> Tensor:
    """Evaluate `score(prompt, head, token)` for everything."""
    return torch.tensor(
        [[[score(b, h, t) for t in range(tokens)] for h in range(HEADS)] for b in range(BATCH)], dtype=torch.float64
    )


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def logit(inputs: AttentionInputs, b: int, head: int, position: int, t: int) -> float:
    """Return the product of one head's query at one position with the key of token t."""
    query = inputs.rotate(inputs.queries[b, head, position : position + 1].double(), position)[0]
    return float(query @ inputs.keys[b, head // GROUP, t].double()) * inputs.scale


def attention(inputs: AttentionInputs, b: int, head: int, position: int) -> list[float]:
    """Return one query's attention to all tokens, zero for those after it."""
    weights = softmax([logit(inputs, b, head, position, t) for t in range(position + 1)])
    return weights + [0.0] * (inputs.seq_len - position - 1)


def close(actual: Tensor, reference: Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), reference, rtol=1e-4, atol=1e-6)


# Formulas as loops


def test_all_scorers_are_registered_under_their_names() -> None:
    assert sorted(SCORERS) == sorted(NAMES)
    assert all(scorer.name == name and "arXiv" in scorer.paper for name, scorer in SCORERS.items())
    assert [name for name, scorer in SCORERS.items() if scorer.needs_reconstruction] == ["kvzip"]


def test_streaming_keeps_the_first_and_the_most_recent() -> None:
    scores = make_scorer("streaming", sink=4, window=0).scores(seen_of())
    assert scores.shape == (BATCH, HEADS, TOKENS)
    for kept in scores.topk(10, dim=-1).indices.reshape(-1, 10):
        assert sorted(kept.tolist()) == [0, 1, 2, 3, *range(TOKENS - 6, TOKENS)]


def test_knorm_is_the_negative_norm_of_the_key() -> None:
    inputs = seen_of()
    expected = by_loop(TOKENS, lambda b, h, t: -math.sqrt(sum(x * x for x in inputs.keys[b, h, t].tolist())))
    close(make_scorer("knorm").score(inputs), expected)


def test_keydiff_is_the_negative_cosine_to_the_mean_direction() -> None:
    inputs = seen_of()

    def score(b: int, h: int, t: int) -> float:
        keys = inputs.keys[b, h].double()
        anchor = sum((key / key.norm() for key in keys), torch.zeros(WIDTH, dtype=torch.float64)) / TOKENS
        return -float(keys[t] @ anchor / (keys[t].norm() * anchor.norm()))

    close(make_scorer("keydiff").score(inputs), by_loop(TOKENS, score))


def test_tova_is_the_last_querys_attention_over_all_heads() -> None:
    inputs = seen_of()
    rows = [[attention(inputs, b, head, TOKENS - 1) for head in range(HEADS * GROUP)] for b in range(BATCH)]
    expected = by_loop(TOKENS, lambda b, h, t: sum(row[t] for row in rows[b]) / (HEADS * GROUP))
    close(make_scorer("tova").score(inputs), expected)


def pooled(values: list[float], kernel: int, pool: str) -> list[float]:
    half, pools = kernel // 2, []
    for t in range(len(values)):
        near = values[max(t - half, 0) : t + half + 1]
        pools.append(max(near) if pool == "max" else sum(near) / kernel)
    return pools


@pytest.mark.parametrize(("window", "kernel", "pool"), [(7, 5, "mean"), (7, 7, "max"), (1, 1, "mean"), (28, 5, "max")])
def test_snapkv_is_the_pooled_attention_of_the_window(window: int, kernel: int, pool: str) -> None:
    inputs, before = seen_of(), TOKENS - window

    def of_head(b: int, head: int) -> list[float]:
        rows = [attention(inputs, b, head, position) for position in range(before, TOKENS)]
        return pooled([sum(row[t] for row in rows) / window for t in range(before)], kernel, pool)

    heads = [[of_head(b, head) for head in range(HEADS * GROUP)] for b in range(BATCH)]
    expected = by_loop(before, lambda b, h, t: sum(heads[b][h * GROUP + g][t] for g in range(GROUP)) / GROUP)
    scores = make_scorer("snapkv", window=window, kernel=kernel, pool=pool).score(inputs)
    close(scores[..., :before], expected)
    assert (scores[..., before:] == torch.inf).all()


def test_snapkv_can_use_the_largest_logit_of_the_group() -> None:
    inputs, window = seen_of(), 6
    before = TOKENS - window

    def of_head(b: int, h: int) -> list[float]:
        rows = []
        for position in range(before, TOKENS):
            logits = [
                max(logit(inputs, b, h * GROUP + g, position, t) for g in range(GROUP)) for t in range(position + 1)
            ]
            rows.append(softmax(logits))
        return pooled([sum(row[t] for row in rows) / window for t in range(before)], 7, "max")

    heads = [[of_head(b, h) for h in range(HEADS)] for b in range(BATCH)]
    scores = make_scorer("snapkv", window=window, kernel=7, pool="max", sharing="max").score(inputs)
    close(scores[..., :before], by_loop(before, lambda b, h, t: heads[b][h][t]))


def mean_rotation(future: int) -> Tensor:
    matrices = []
    for position in range(TOKENS, TOKENS + future):
        columns = [turn(unit[None], position)[0] for unit in torch.eye(WIDTH, dtype=torch.float64)]
        matrices.append(torch.stack(columns, dim=1))
    return torch.stack(matrices).mean(dim=0)


@pytest.mark.parametrize(("sink", "future", "eps", "skip"), [(4, 512, 0.0, 4), (0, 3, 0.01, 0), (4, 1, 0.5, 2)])
def test_expected_attention_matches_its_formula(sink: int, future: int, eps: float, skip: int) -> None:
    inputs = seen_of()
    rotation = mean_rotation(future)

    def of_head(b: int, head: int) -> list[float]:
        queries = inputs.queries[b, head, skip:].double()
        mean = rotation @ queries.mean(dim=0)
        covariance = rotation @ torch.cov(queries.T, correction=0) @ rotation.T
        keys = inputs.keys[b, head // GROUP, sink:].double()
        return softmax([float(mean @ k * SCALE + k @ covariance @ k * SCALE**2 / 2) for k in keys])

    heads = [[of_head(b, head) for head in range(HEADS * GROUP)] for b in range(BATCH)]

    def score(b: int, h: int, t: int) -> float:
        share = sum(heads[b][h * GROUP + g][t] for g in range(GROUP)) / GROUP
        return (share + eps) * float(inputs.values[b, h, t + sink].norm())

    scores = make_scorer("expected", sink=sink, future=future, eps=eps, skip=skip).score(inputs)
    close(scores[..., sink:], by_loop(TOKENS - sink, score))
    assert (scores[..., :sink] == torch.inf).all()


def test_kvzip_uses_the_reconstruction_attention() -> None:
    inputs = seen_of()
    assert inputs.reconstruction is not None
    close(make_scorer("kvzip").score(inputs), inputs.reconstruction.double())
    with pytest.raises(ModelError, match="second pass"):
        make_scorer("kvzip").score(replace(inputs, reconstruction=None))


# Meaning


def test_keydiff_ignores_the_norm_of_a_key() -> None:
    inputs = seen_of()
    longer = inputs.keys * torch.linspace(0.1, 20, TOKENS)[:, None]
    close(make_scorer("keydiff").score(replace(inputs, keys=longer)), make_scorer("keydiff").score(inputs).double())


def test_knorm_ranks_short_keys_first() -> None:
    inputs = seen_of()
    lengths = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1)) + 1.0
    keys = torch.nn.functional.normalize(inputs.keys, dim=-1) * lengths[:, None]
    order = make_scorer("knorm").score(replace(inputs, keys=keys)).argsort(dim=-1, descending=True)
    assert (order == lengths.argsort()).all()


def test_tova_gives_all_heads_the_same_and_sums_to_one() -> None:
    scores = make_scorer("tova").score(seen_of())
    assert (scores[:, 0] == scores[:, 1]).all()
    torch.testing.assert_close(scores.sum(dim=-1), torch.ones(BATCH, HEADS))
    assert not torch.allclose(scores[0], scores[1])  # prompts are independent


@pytest.mark.parametrize("variant", [{}, {"pool": "max"}, {"sharing": "max"}])
def test_snapkv_finds_the_token_the_last_queries_attend_to(variant: dict[str, Any]) -> None:
    inputs, window, needle = seen_of(), 6, 13
    looks = turn(inputs.queries[:, :, -window:], TOKENS - window).unflatten(1, (HEADS, GROUP)).mean(dim=(2, 3))
    keys = inputs.keys.clone()
    keys[:, :, needle] = 20 * looks / looks.norm(dim=-1, keepdim=True)
    scores = make_scorer("snapkv", sink=0, window=window, kernel=1, **variant).score(replace(inputs, keys=keys))
    assert (scores[..., : TOKENS - window].argmax(dim=-1) == needle).all()


def test_snapkv_does_not_pool_across_its_window() -> None:
    """All attention falls on the first token of the window; none may leak to earlier tokens."""
    inputs, window = seen_of(), 6
    keys = inputs.keys.clone()
    keys[:, :, -window] = 10
    looking = replace(inputs, keys=keys, queries=torch.ones_like(inputs.queries), rotate=lambda vectors, first: vectors)
    for pool in ("mean", "max"):
        scores = make_scorer("snapkv", window=window, pool=pool).score(looking)[..., :-window]
        assert scores.max() < 1e-6


def test_expected_attention_is_the_mean_over_gaussian_queries() -> None:
    """E[exp(q.k)] at the next position, from queries drawn from the prompt's distribution."""
    inputs = seen_of()
    inputs = replace(inputs, values=torch.nn.functional.normalize(inputs.values, dim=-1))
    generator = torch.Generator().manual_seed(3)
    shares = torch.zeros(BATCH, HEADS, TOKENS, dtype=torch.float64)
    for b in range(BATCH):
        for head in range(HEADS * GROUP):
            queries = inputs.queries[b, head].double()
            root = torch.linalg.cholesky(torch.cov(queries.T, correction=0))
            draws = torch.randn(40_000, WIDTH, dtype=torch.float64, generator=generator) @ root.T + queries.mean(dim=0)
            rotated_queries = turn(draws[:, None], TOKENS)[:, 0]
            mass = (rotated_queries @ inputs.keys[b, head // GROUP].double().T * SCALE).exp().mean(dim=0)
            shares[b, head // GROUP] += mass / mass.sum() / GROUP
    scores = make_scorer("expected", sink=0, future=1, skip=0).score(inputs)
    torch.testing.assert_close(scores.double(), shares, rtol=0.1, atol=0.002)


def test_expected_attention_of_equal_queries_is_their_attention() -> None:
    """With no variance and one future position: the attention of the query itself times the norm of the value."""
    inputs = seen_of()
    same = replace(inputs, queries=inputs.queries[:, :, -1:].expand_as(inputs.queries))
    query = turn(same.queries[:, :, :1], TOKENS).unflatten(1, (HEADS, GROUP))[:, :, :, 0]
    expected = (query @ inputs.keys.mT * SCALE).softmax(dim=-1).mean(dim=2) * inputs.values.norm(dim=-1)
    close(make_scorer("expected", sink=0, future=1).score(same), expected.double())


def test_expected_attention_of_only_outliers_is_finite() -> None:
    assert make_scorer("expected", sink=0, window=0, skip=4).scores(seen_of(3)).isfinite().all()


# Behavior shared by all scorers


@pytest.mark.parametrize("name", NAMES)
def test_the_first_and_the_last_tokens_are_always_kept(name: str) -> None:
    scores = make_scorer(name, sink=3, window=5).scores(seen_of())
    forced = torch.zeros(TOKENS, dtype=torch.bool)
    forced[:3] = forced[-5:] = True
    assert (scores.isinf() == forced).all()
    assert not scores.isnan().any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 3, 5, 8])
def test_a_prompt_shorter_than_the_budget_is_not_evicted(name: str, tokens: int) -> None:
    scores = make_scorer(name, sink=4, window=8).scores(seen_of(tokens))
    assert scores.shape == (BATCH, HEADS, tokens)
    assert (scores == torch.inf).all()


@pytest.mark.parametrize("name", NAMES)
def test_batching_and_half_precision_do_not_change_the_scores(name: str) -> None:
    inputs = seen_of()
    full = make_scorer(name, window=5).score(inputs)
    assert inputs.reconstruction is not None
    second = AttentionInputs(
        inputs.keys[1:], inputs.values[1:], inputs.queries[1:], turn, SCALE, inputs.reconstruction[1:]
    )
    torch.testing.assert_close(make_scorer(name, window=5).score(second), full[1:])
    half = AttentionInputs(
        *(x.bfloat16() for x in (inputs.keys, inputs.values, inputs.queries)),
        turn,
        SCALE,
        inputs.reconstruction.bfloat16(),
    )
    scores = make_scorer(name, window=5).score(half)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, full, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("name", "parameters", "sentence"),
    [
        ("snap", {}, "no scorer 'snap'"),
        ("tova", {"kernel": 5}, "has no parameter 'kernel'; it has sink, window"),
        ("tova", {"name": "x"}, "has no parameter 'name'"),
        ("tova", {"window": 2.5}, "must be an integer, not 2.5"),
        ("tova", {"window": True}, "must be an integer, not True"),
        ("snapkv", {"pool": 3}, "must be a string, not 3"),
        ("knorm", {"sink": -1}, "sink is -1"),
        ("streaming", {"window": -2}, "window is -2"),
        ("snapkv", {"window": 0}, "window is 0"),
        ("snapkv", {"window": -3}, "window is -3"),
        ("snapkv", {"kernel": 4}, "kernel is 4"),
        ("snapkv", {"kernel": -1}, "kernel is -1"),
        ("snapkv", {"pool": "median"}, "pool is 'median'"),
        ("snapkv", {"sharing": "sum"}, "sharing is 'sum'"),
        ("expected", {"future": 0}, "future is 0"),
        ("expected", {"eps": -0.1}, "eps is -0.1"),
        ("expected", {"eps": math.nan}, "eps is nan"),
        ("expected", {"skip": -1}, "skip is -1"),
    ],
)
def test_invalid_parameters_are_refused_in_one_sentence(name: str, parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make_scorer(name, **parameters)
    assert sentence in str(raised.value)
    assert str(raised.value).endswith((".", "?")) and "\n" not in str(raised.value)


def test_parameters_reach_the_scorer() -> None:
    scorer = make_scorer("expected", eps=1, future=7)
    assert isinstance(scorer, Scorer)
    assert scorer == SCORERS["expected"](eps=1, future=7)


def test_a_scorer_may_have_a_bool_parameter() -> None:
    registry: Registry[Scorer] = Registry("scorer")

    @registry.register("flagged", paper="none")
    @dataclass(frozen=True)
    class Flagged(Knorm):
        reverse: bool = False

    scorer = registry.build("flagged", reverse=True, window=3)
    assert isinstance(scorer, Flagged) and scorer.reverse is True and scorer.window == 3
    for wrong in (1, "true", None):
        with pytest.raises(ConfigError, match="reverse of the scorer flagged must be true or false"):
            registry.build("flagged", reverse=wrong)
