"""A KV cache whose heads keep different numbers of tokens: with everything kept it equals the plain cache, otherwise
the masked reference; reserved blocks are the blocks used; conversations continue from what was kept.
"""

from __future__ import annotations

import dataclasses
import math
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smelt.kvcache.eviction.attention import masked_attention
from smelt.kvcache.eviction.budget import retained_mask
from smelt.kvcache.eviction.clusters import HeadClusters, cluster_heads
from smelt.kvcache.eviction.policy import EvictionPolicy, RequestRetention
from smelt.kvcache.eviction.prefill import RecordedPrefill, decode_logits, record_prefill
from smelt.kvcache.eviction.scorer import AttentionInputs, Scorer
from smelt.kvcache.eviction.scorers import make_scorer
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.per_head.cache_manager import PerHeadCacheManager, PerHeadSession, per_head_state
from smelt.serve.engine.per_head.step import PerHeadBatch
from smelt.serve.engine.request import Request
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.session_cache import SessionCache
from tests.tiny import BUILDS

LAYERS, HEADS, BLOCK = 3, 2, 4
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SMALL: dict[str, Any] = {"block_size": BLOCK, "max_model_len": 120, "kv_cache_bytes": 10**7}


def shuffled(size: int, seed: int) -> HeadClusters:
    """Cluster arbitrary heads of arbitrary layers."""
    cells = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
    random.Random(seed).shuffle(cells)
    return HeadClusters(
        LAYERS, HEADS, tuple(tuple(sorted(cells[start : start + size])) for start in range(0, len(cells), size))
    )


def retention(share: float | list[float], size: int = 2, seed: int = 0, scorer: Scorer | None = None) -> EvictionPolicy:
    clusters = shuffled(size, seed)
    budgets = [share] * len(clusters.members) if isinstance(share, float) else share
    return EvictionPolicy(clusters, tuple(budgets), scorer or make_scorer("keydiff", sink=2, window=4), BLOCK)


def model_of(family: str) -> Model:
    return Model(BUILDS[family](), None)


def words(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 99) for _ in range(count)]


def prompts(count: int, seed: int = 0, max_length: int = 80) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 99) for _ in range(rng.randrange(1, max_length))] for _ in range(count)]


def run(engine: Engine) -> None:
    """Run to the end, checking the invariants after every step."""
    memory = engine.scheduler.cache_manager
    while engine.busy:
        engine.step()
        check(engine)
    assert engine.state()["blocks_used"] == 0
    if isinstance(memory, PerHeadCacheManager):
        memory.drop_sessions()
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


def check(engine: Engine) -> None:
    """Assert that pages match the accounting block for block, and none has two owners."""
    pool = engine.pool
    assert pool.num_free_blocks + sum(count > 0 for count in pool.references) == pool.num_blocks
    for request in engine.scheduler.running:
        if request.cache_state is not None:
            assert len(request.blocks) == len(set(request.cache_state.entries)) == len(request.cache_state.entries)
            assert len(request.blocks) >= int(
                request.cache_state.retention.num_pages(request.num_computed_tokens).sum()
            )
    if isinstance(engine.scheduler.cache_manager, PerHeadCacheManager):
        used_pages = {page for request in engine.scheduler.running for page in request.blocks}
        state = engine.state()
        assert state["blocks_used"] == len(used_pages)
        assert state["blocks_used"] + state["blocks_carried"] + pool.num_free_blocks == pool.num_blocks


def answers(engine: Engine, texts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    requests = [engine.submit(text, sampling)[0] for text in texts]
    run(engine)
    return [request.output for request in requests]


def test_warmup_leaves_no_trace() -> None:
    engine = Engine(model_of("llama"), **SMALL, kv_profile=retention(0.3))
    before = engine.state()
    engine.warmup([60, 9])
    assert engine.state() == before and engine.pool.num_free_blocks == engine.pool.num_blocks


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt"])
def test_everything_kept_equals_the_plain_cache(family: str) -> None:
    texts = prompts(5)
    model = model_of(family)
    heads = sum(part.units for part in model.anatomy.parts if part.kind == "heads") // LAYERS
    plain = answers(Engine(model_of(family), **SMALL), texts)
    for size in (1, 2, LAYERS * heads):
        clusters = cluster_heads(torch.rand(LAYERS, heads), size)
        every = EvictionPolicy(
            clusters, (1.0,) * len(clusters.members), make_scorer("keydiff", sink=2, window=4), BLOCK
        )
        assert answers(Engine(model, kv_profile=every, max_num_batched_tokens=16, **SMALL), texts) == plain


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_logits_with_everything_kept_under_any_cluster_map(size: int) -> None:
    text = words(90, seed=3)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=20)
    plain = logprobs(Engine(model_of("llama"), **SMALL), text, params)
    for seed in range(3):
        engine = Engine(model_of("llama"), kv_profile=retention(1.0, size, seed), max_num_batched_tokens=16, **SMALL)
        torch.testing.assert_close(logprobs(engine, text, params), plain, atol=1e-5, rtol=0)


def logprobs(engine: Engine, text: list[int], sampling: SamplingParams) -> torch.Tensor:
    engine.submit(text, sampling)
    result = []
    while engine.busy:
        for event in engine.step():
            assert event.logprobs is not None
            result.append(sorted(value for _, value in event.logprobs.top))
    return torch.tensor(result)


def test_pages_match_the_budgets() -> None:
    """Page for page: the blocks of a request, and the ideal of its heads."""
    profile = retention([0.5, 0.25, 0.1])
    engine = Engine(model_of("llama"), kv_profile=profile, max_num_batched_tokens=32, **SMALL)
    text = words(103, seed=1)
    request = engine.submit(text, GREEDY)[0]
    engine.step()
    lengths = [6 + math.ceil(share * (102 - 6)) for share in (0.5, 0.25, 0.1)]
    assert len(request.blocks) == sum(math.ceil(length / BLOCK) for length in lengths)
    run(engine)


@pytest.mark.parametrize("name", ["keydiff", "knorm", "streaming", "tova", "snapkv", "expected"])
def test_a_prompt_in_one_chunk_matches_the_masked_reference(name: str) -> None:
    """The masked network, which frees nothing, gives the same logits."""
    scorer = make_scorer(name, sink=2, window=8)
    shares = [0.6, 0.3, 0.1]
    profile = retention(shares, size=2, seed=1, scorer=scorer)
    model = model_of("llama")
    text = words(100, seed=5)
    *prompt, last = text
    prefill = record_prefill(model, torch.tensor([prompt]))
    counts = RequestRetention.empty(profile, len(prompt)).lengths(len(prompt))
    head_counts = torch.from_numpy(counts)[profile.clusters.cluster]  # [layers, kv_heads]
    assert head_counts.min() < head_counts.max() < len(prompt), "nothing would be compressed, or all alike"
    scores = torch.stack([scorer.scores(inputs) for inputs in prefill.layers])
    reference = decode_logits(model, prefill, retained_mask(scores, head_counts[:, None]), torch.tensor([[last]]))[
        0, -1
    ]
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=20)
    actual_logprobs = logprobs(Engine(model, kv_profile=profile, max_num_batched_tokens=256, **SMALL), text, params)
    torch.testing.assert_close(
        actual_logprobs[0], reference.log_softmax(-1).topk(20).values.sort().values, atol=2e-5, rtol=0
    )


def test_a_prompt_in_two_chunks_matches_the_masked_reference() -> None:
    """The second chunk sees what is left of the first, and scores the first one's window with its own tokens."""
    scorer = make_scorer("snapkv", sink=2, window=8)
    profile, model = retention([0.6, 0.3, 0.1], seed=1, scorer=scorer), model_of("llama")
    *prompt, last = words(101, seed=6)
    kept = RequestRetention.empty(profile, 100)
    half = kept.next_chunk(0, 60)
    first = record_prefill(model, torch.tensor([prompt[:half]]))
    scores = torch.stack([scorer.scores(inputs) for inputs in first.layers])
    head_counts = torch.from_numpy(kept.lengths(half))[profile.clusters.cluster][:, None]
    mask = retained_mask(scores, head_counts)  # [layers, 1, kv_heads, half]
    recorded: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    cache = first.cache()
    with (
        masked_attention(model.network, mask, lambda layer, *inputs: recorded.update({layer: inputs})),
        torch.no_grad(),
    ):
        model.network(torch.tensor([prompt[half:]]), past_key_values=cache)
    region = 100 - half + 8
    later = make_scorer("snapkv", sink=0, window=8)
    ends = torch.from_numpy(kept.lengths(100))[profile.clusters.cluster][:, None]
    mask_of_both = torch.zeros(LAYERS, 1, HEADS, 100, dtype=torch.bool)
    mask_of_both[..., : half - 8] = mask[..., : half - 8]
    for layer, (queries, keys, values) in recorded.items():
        tail = [side[:, :, -region:] for side in (keys, values)]
        inputs = AttentionInputs(*tail, queries[:, :, :0], lambda x, _: x, 8**-0.5, rotated_queries=queries)
        locked = head_counts[layer] - 8
        mask_of_both[layer, :, :, -region:] = retained_mask(later.scores(inputs)[None], (ends[layer] - locked)[None])[0]
    after = RecordedPrefill(
        [AttentionInputs(keys, values, keys, lambda x, _: x, 1.0) for _, keys, values in recorded.values()],
        first.logits, model.network.config,
    )  # fmt: skip
    reference = decode_logits(model, after, mask_of_both, torch.tensor([[last]]))[0, -1].log_softmax(-1)
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=20)
    actual = logprobs(Engine(model, kv_profile=profile, max_num_batched_tokens=60, **SMALL), [*prompt, last], params)
    torch.testing.assert_close(actual[0], reference.topk(20).values.sort().values, atol=2e-5, rtol=0)


def test_several_turns_with_everything_kept_equal_the_plain_cache() -> None:
    """The next turn writes to its own pages: two requests that continue one text do not disturb each other."""
    engines = [
        Engine(model_of("llama"), kv_profile=retention(1.0), max_num_batched_tokens=24, **SMALL),
        Engine(model_of("llama"), **SMALL),
    ]
    answered = []
    for engine in engines:
        text = words(33, seed=7)
        for turn in range(3):
            requests = [engine.submit([*text, 50 + turn, 60 + client], GREEDY)[0] for client in range(2)]
            while engine.busy:
                engine.step()
                check(engine)
            answered.append([request.output for request in requests])
            text = requests[1].tokens
    assert answered[:3] == answered[3:]
    assert engines[0].state()["cached_tokens"] > 0


def test_the_program_matches_the_module() -> None:
    texts = prompts(5, seed=12)
    settings = {"kv_profile": retention([0.5, 0.2, 0.0]), "max_num_batched_tokens": 24, **SMALL}
    fast, plain = Engine(model_of("qwen3"), **settings), Engine(model_of("qwen3"), compiled=False, **settings)
    if not fast.runner.backend.startswith("compiled-cpu"):
        pytest.skip("there is no compiled library on this machine")
    assert plain.runner.backend == "eager, per-head cache"
    assert answers(fast, texts) == answers(plain, texts)


def test_kept_tokens_do_not_depend_on_the_batch() -> None:
    texts = prompts(7, seed=2)
    settings = {"kv_profile": retention([0.5, 0.2, 0.0]), "max_num_batched_tokens": 24, **SMALL}
    alone = [answers(Engine(model_of("llama"), **settings), [text])[0] for text in texts]
    assert answers(Engine(model_of("llama"), **settings), texts) == alone
    small_batch = answers(Engine(model_of("llama"), max_num_seqs=3, **settings), texts)
    assert small_batch == alone


def test_a_tight_cache_preempts_and_answers_every_request() -> None:
    texts = prompts(6, seed=4)
    tight = {**SMALL, "kv_cache_bytes": 80_000}
    engine = Engine(
        model_of("llama"), kv_profile=retention([0.5, 0.2, 0.0]), max_num_batched_tokens=24, max_num_seqs=6, **tight
    )
    long = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    result = answers(engine, texts, long)
    assert engine.state()["preemptions"] > 0, "the cache is not tight enough to see anything"
    assert all(len(answer) == min(40, 120 - len(text)) for answer, text in zip(result, texts, strict=True))


def test_pages_are_reserved_once_and_grow_only_with_written_tokens() -> None:
    engine = Engine(model_of("llama"), kv_profile=retention([1.0, 0.1, 0.0]), max_num_batched_tokens=24, **SMALL)
    text = words(99, seed=8)
    request = engine.submit(text, GREEDY)[0]
    page_counts = []
    while engine.busy:
        engine.step()
        check(engine)
        if request.cache_state is not None:
            page_counts.append((request.num_computed_tokens, len(request.blocks)))
    stop = len(text) - 1
    reserved = {pages for computed, pages in page_counts if computed <= stop}
    assert len(reserved) == 1, "a prompt's pages change while it is read"
    full = 3 * -(-stop // BLOCK)
    assert reserved.pop() < 0.6 * full
    counts = [pages for _, pages in page_counts]
    assert counts == sorted(counts)


def test_a_conversation_continues_from_its_kept_tokens() -> None:
    """The second turn computes only new tokens, and matches an engine that read turn after turn."""
    settings: dict[str, Any] = {"kv_profile": retention([0.6, 0.3, 0.0]), "max_num_batched_tokens": 24, **SMALL}
    first, more = words(70, seed=9), [11, 12, 13]
    engine = Engine(model_of("llama"), **settings)
    one = engine.submit(first, GREEDY)[0]
    while engine.busy:
        engine.step()
    full_text = first + one.output + more
    two = engine.submit(full_text, GREEDY)[0]
    twin = engine.submit(full_text, GREEDY)[0]
    while engine.busy:
        engine.step()
        check(engine)
    assert two.num_cached_tokens == len(first) + len(one.output) - 1
    assert two.output == twin.output
    other = Engine(model_of("llama"), **settings)
    repeated = other.submit(first, GREEDY)[0]
    while other.busy:
        other.step()
    assert repeated.output == one.output
    third = other.submit(full_text, GREEDY)[0]
    while other.busy:
        other.step()
    assert third.output == two.output
    run(engine)


def test_another_salt_gets_no_cache_hit() -> None:
    engine = Engine(model_of("llama"), kv_profile=retention(0.5), **SMALL)
    text = words(80, seed=9)
    engine.submit(text, GREEDY, salt=b"a")
    while engine.busy:
        engine.step()
    other = engine.submit([*text, 4], GREEDY, salt=b"b")[0]
    same = engine.submit([*text, 5], GREEDY, salt=b"a")[0]
    while engine.busy:
        engine.step()
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, len(text) - 1)


def test_samples_of_one_prompt_share_its_kept_tokens() -> None:
    engine = Engine(model_of("llama"), kv_profile=retention(0.5), max_num_batched_tokens=24, **SMALL)
    text = words(80, seed=9)
    requests = engine.submit(text, SamplingParams(n=4, max_tokens=8, temperature=1.0, seed=3, ignore_eos=True))
    while engine.busy:
        engine.step()
        check(engine)
    assert [request.num_cached_tokens for request in requests] == [0, *[len(text) - 1] * 3]
    alone = Engine(model_of("llama"), kv_profile=retention(0.5), max_num_batched_tokens=24, **SMALL)
    last = alone.submit(text, SamplingParams(max_tokens=8, temperature=1.0, seed=6, ignore_eos=True))[0]
    run(alone)
    assert requests[3].output == last.output


@pytest.mark.slow
def test_nothing_leaks_over_500_conversations() -> None:
    """Random turns, ends and disconnects on a cache that must evict; at the end every page is free."""
    rng = random.Random(0)
    tight = {**SMALL, "kv_cache_bytes": 120_000}
    engine = Engine(
        model_of("llama"), kv_profile=retention([0.5, 0.2, 0.0]), max_num_batched_tokens=24, max_num_seqs=8, **tight
    )
    texts: dict[int, list[int]] = {}
    running: dict[int, Request] = {}
    begun = left = 0
    while begun < 500 or running:
        if len(running) < 8 and begun < 500:
            texts[begun] = [rng.randrange(3, 99) for _ in range(rng.randrange(1, 60))]
            begun += 1
        for client in [client for client in texts if client not in running][:4]:
            sampling = SamplingParams(max_tokens=rng.randrange(1, 10), temperature=0, ignore_eos=True)
            running[client] = engine.submit(texts[client], sampling, salt=bytes([client % 3]))[0]
        if rng.random() < 0.15:
            engine.abort(running[rng.choice(list(running))])
            left += 1
        engine.step()
        check(engine)
        for client in [client for client, request in running.items() if request.state.value == "finished"]:
            request = running.pop(client)
            texts[client] = [*request.tokens, *(rng.randrange(3, 99) for _ in range(3))]
            if request.reason == "abort" or len(texts[client]) > 100 or rng.random() < 0.3:
                del texts[client]
    state = engine.state()
    assert left > 100 and state["cached_tokens"] > 1000 and state["generated_tokens"] > 1000
    run(engine)


def test_chunks_have_about_equal_length_and_their_budgets_add_up() -> None:
    profile = retention([0.5, 0.2, 0.0])
    for tokens in range(1, 200):
        kept = RequestRetention.empty(profile, tokens)
        done, sizes = 0, []
        while done < tokens:
            sizes.append(kept.next_chunk(done, 24))
            eviction = kept.eviction_step(done, done + sizes[-1])
            if eviction is not None:
                assert (eviction.retained >= eviction.window).all() and (eviction.retained <= eviction.region).all()
                assert (eviction.locked + eviction.retained == kept.lengths(done + sizes[-1])).all()
            done += sizes[-1]
        assert max(sizes) <= 24 and max(sizes) - min(sizes) <= 1
        lengths = kept.lengths(tokens)
        assert (lengths <= tokens).all() and (np.diff(lengths) <= 0).all()
        assert all(length == tokens or length % BLOCK == 0 for length in lengths), "a page is left half empty"


def test_moved_tokens_have_distinct_slots() -> None:
    profile = retention([0.5, 0.2, 0.0])
    engine = Engine(model_of("llama"), kv_profile=profile, max_num_batched_tokens=24, **SMALL)
    moves = []

    def watched(compress: Any, batch: PerHeadBatch, layer: int, *rest: Any) -> None:
        moves.extend(row.tolist() for chunk in batch.eviction_chunks for row in chunk.target_rows[layer])
        compress(batch, layer, *rest)

    engine.runner._compress = partial(watched, engine.runner._compress)  # type: ignore[attr-defined]
    engine.submit(words(90), GREEDY)
    run(engine)
    assert len(moves) > 10 and all(len(set(row)) == len(row) for row in moves)


def test_session_caches_are_evicted_in_lru_order() -> None:
    texts, nothing = SessionCache(), np.zeros(1, dtype=np.int64)
    for length in (3, 5, 7):
        assert texts.add(b"", list(range(10)), PerHeadSession(length, nothing, {}))
    assert not texts.add(b"", list(range(10)), PerHeadSession(3, nothing, {}))  # already cached; this refreshes it
    match = texts.find(b"", list(range(6)))
    assert match is not None and match.tokens == 5
    assert texts.find(b"", list(range(3))) is None  # at least one token must remain to compute
    assert [texts.drop().tokens for _ in range(3)] == [7, 3, 5] and len(texts) == 0
    assert texts.find(b"", list(range(10))) is None


def test_prompts_below_the_floor_stay_complete() -> None:
    """Nothing is evicted of short prompts, whatever the budgets; more is kept of long ones than without a floor."""
    floor, model = 40, model_of("llama")
    short, long = [words(count, seed=count) for count in (6, 23, 39, 41)], words(90, seed=7)
    plain = answers(Engine(model_of("llama"), **SMALL), short)
    policy = dataclasses.replace(retention([0.2, 0.1, 0.0]), min_tokens=floor)
    settings: dict[str, Any] = {"max_num_batched_tokens": 24, **SMALL}
    assert answers(Engine(model, kv_profile=policy, **settings), short) == plain
    assert answers(Engine(model_of("llama"), kv_profile=retention([0.2, 0.1, 0.0]), **settings), short) != plain
    engine = Engine(model_of("llama"), kv_profile=policy, **settings)
    request = engine.submit(long, GREEDY)[0]
    while len(request.tokens) == len(long):
        engine.step()
    assert per_head_state(request).retention.lengths(len(long) - 1).tolist() == [floor] * 3
    run(engine)


@given(st.integers(1, 400), st.integers(16, 60), st.integers(0, 120), st.sampled_from([0.0, 0.1, 0.5]))
def test_every_chunk_keeps_its_window_above_any_floor(length: int, chunk: int, floor: int, share: float) -> None:
    policy = dataclasses.replace(retention(share), min_tokens=floor)
    request, start = RequestRetention.empty(policy, length), 0
    while start < length:
        stop = start + request.next_chunk(start, chunk)
        step = request.eviction_step(start, stop)
        if step is not None:
            assert (step.retained >= step.window).all() and (step.retained <= step.region).all()
            assert (step.locked >= 0).all()
        start = stop
    aligned = -(-floor // BLOCK) * BLOCK
    assert (request.lengths(length) >= min(length, aligned)).all() and (request.lengths(length) <= length).all()


def test_bytes_can_be_compared_between_kinds_of_caches() -> None:
    """A page of a cluster is smaller than a block of all heads; bytes per token are less where tokens are evicted."""
    text = words(80)

    def bytes_per_token(**settings: Any) -> float:
        engine = Engine(model_of("llama"), **SMALL, **settings)
        request = engine.submit(text, GREEDY)[0]
        while len(request.tokens) < len(text) + 4:
            engine.step()
        state = engine.state()
        run(engine)
        assert 0 < state["kv_bytes_used"] <= state["kv_bytes"] <= SMALL["kv_cache_bytes"]
        assert state["kv_tokens"] == len(text) + 3  # the last token was sampled, and is not computed yet
        assert engine.state()["kv_bytes_used"] == engine.state()["kv_tokens"] == 0
        return state["kv_bytes_used"] / state["kv_tokens"]

    exact = 2 * LAYERS * HEADS * 8 * 4  # keys and values of all heads in float32
    assert exact <= bytes_per_token() < 1.1 * exact
    assert exact <= bytes_per_token(kv_profile=retention(1.0)) < 1.1 * exact
    assert bytes_per_token(kv_profile=retention(0.2)) < 0.5 * exact
    assert bytes_per_token(kv_cache_dtype="int8") < 0.6 * exact
