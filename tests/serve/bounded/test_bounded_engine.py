"""An engine with a bounded KV cache matches the plain engine while a text fits and a text stream when it does not;
pages stay within the cap, are all freed, and no answer depends on the rest of the batch.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smelt.kvcache.streaming import InfiniPot, TextStream
from smelt.kvcache.streaming.config import BoundedCacheConfig
from smelt.models.model import Model
from smelt.serve.engine.bounded.cache_manager import BoundedCacheManager
from smelt.serve.engine.bounded.runner import BoundedRunner
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.request import Request
from smelt.serve.engine.runner import InflightBatch
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.scheduler import ScheduledBatch
from tests.serve.test_adapters import merged, write_adapter
from tests.serve.test_engine import expected
from tests.tiny import BUILDS
from tests.trained import sentences, trained_llama

PROMPT = (5, 6, 7)
RULE = InfiniPot(prompt=PROMPT)
CAP, KEEP, BLOCK = 42, 14, 4
FULL, BLOCKS_PER_REQUEST = CAP - len(PROMPT), -(-CAP // BLOCK)  # tokens of a full cache, and its pages
BLOCK_BYTES = 3 * 2 * BLOCK * (2 * 8 * 4 + 4)  # keys, values and numbers
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True)


def bounded_engine(network: PreTrainedModel | None = None, **more: Any) -> Engine:
    """Build an engine with memory for 8 bounded caches by default."""
    settings = {"block_size": BLOCK, "kv_cache_bytes": 8 * BLOCKS_PER_REQUEST * BLOCK_BYTES, **more}
    model = Model(copy.deepcopy(network) if network is not None else BUILDS["llama"]())
    return Engine(model, **{"kv_token_cap": BoundedCacheConfig(CAP, KEEP, RULE), **settings})


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """Return a trained network, whose answers differ from each other."""
    return copy.deepcopy(trained_llama(sentences(400)))


def memory_of(engine: Engine) -> BoundedCacheManager:
    assert isinstance(engine.scheduler.cache_manager, BoundedCacheManager)
    return engine.scheduler.cache_manager


def runner_of(engine: Engine) -> BoundedRunner:
    assert isinstance(engine.runner, BoundedRunner)
    return engine.runner


def words(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 99) for _ in range(count)]


def texts_of(lengths: list[int]) -> list[list[int]]:
    return [words(length, seed) for seed, length in enumerate(lengths)]


LENGTHS = [200, 3, FULL, FULL + 1, 90, FULL - 2]


def run(engine: Engine) -> None:
    """Run to the end, checking the invariants after every step."""
    while engine.busy:
        engine.step()
        check(engine)
    state = engine.state()
    assert state["blocks_used"] == 0 and state["blocks_carried"] + engine.pool.num_free_blocks == engine.pool.num_blocks
    memory_of(engine).drop_sessions()
    assert engine.pool.num_free_blocks == engine.pool.num_blocks and not any(engine.pool.references)


def check(engine: Engine) -> None:
    used_blocks = [block for request in engine.scheduler.running for block in request.blocks]
    assert len(used_blocks) == len(set(used_blocks)) == engine.state()["blocks_used"]
    assert all(len(request.blocks) <= BLOCKS_PER_REQUEST for request in engine.scheduler.running)
    for request in engine.scheduler.waiting:
        assert request.cache_state is None and not request.blocks


def answers(engine: Engine, texts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    requests = [engine.submit(text, sampling)[0] for text in texts]
    run(engine)
    return [request.output for request in requests]


# While everything fits


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_a_text_that_fits_matches_the_plain_engine(name: str, compiled: bool) -> None:
    network = BUILDS[name]()
    texts = texts_of([1, 5, FULL - 16, 12])
    engine = bounded_engine(network, compiled=compiled)
    assert answers(engine, texts) == [expected(network, text) for text in texts]
    assert runner_of(engine).num_compressions == 0


@pytest.mark.parametrize("compiled", [True, False])
def test_logits_of_a_text_that_fits_match_the_plain_engine(llama: PreTrainedModel, compiled: bool) -> None:
    params, text = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=20), words(FULL - 8, 3)
    plain = Engine(
        Model(copy.deepcopy(llama)), block_size=BLOCK, max_model_len=96, kv_cache_bytes=10**7, compiled=compiled
    )
    result = [logprobs(engine, text, params) for engine in (plain, bounded_engine(llama, compiled=compiled))]
    torch.testing.assert_close(result[1], result[0], atol=1e-5, rtol=0)


def logprobs(engine: Engine, text: list[int], sampling: SamplingParams) -> torch.Tensor:
    engine.submit(text, sampling)
    result = []
    while engine.busy:
        for event in engine.step():
            assert event.logprobs is not None
            result.append([value for _, value in event.logprobs.top])
    return torch.tensor(result)


def test_a_half_precision_network() -> None:
    network, texts = BUILDS["llama"]().to(torch.bfloat16), texts_of([1, 5, FULL - 16, 12])
    plain = Engine(
        Model(copy.deepcopy(network)), block_size=BLOCK, max_model_len=96, kv_cache_bytes=10**7, compiled=False
    )
    reference = [plain.submit(text, GREEDY)[0] for text in texts]
    while plain.busy:
        plain.step()
    engine = bounded_engine(network, compiled=False)
    assert answers(engine, texts) == [request.output for request in reference]
    assert len(answers(engine, [words(200)])[0]) == 16 and runner_of(engine).num_compressions > 5


# A stream's cache


def streamed(network: PreTrainedModel) -> TextStream:
    return TextStream(Model(copy.deepcopy(network)), CAP, keep=KEEP, reserved=len(PROMPT), method=RULE)


def cached_tokens(engine: Engine, request: Request, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a running request's token numbers [kv_heads, length], keys and values [kv_heads, length, head_dim]."""
    runner, length = runner_of(engine), memory_of(engine).size.length(request.num_computed_tokens)
    rows = torch.tensor([request.blocks[position // BLOCK] * BLOCK + position % BLOCK for position in range(length)])
    numbers = runner.pages.token_indices.flatten(0, 1)[rows, layer].T.long()
    keys, values = (
        pages[layer].flatten(0, 1)[rows].transpose(0, 1) for pages in (runner.cache.keys, runner.cache.values)
    )
    return numbers, keys, values


@pytest.mark.parametrize("compiled", [True, False])
def test_the_pages_of_a_long_text_match_a_streams_cache(llama: PreTrainedModel, compiled: bool) -> None:
    """Over prompt and answer, after every step: the same tokens per head, keys, values and novelty."""
    engine, stream = bounded_engine(llama, compiled=compiled, prefill_chunk_size=9), streamed(llama)
    request = engine.submit(words(150), LONG)[0]
    while engine.busy:
        engine.step()
        if not request.blocks:
            break
        stream.push(request.tokens[stream.num_seen : request.num_computed_tokens])
        assert stream.length == memory_of(engine).size.length(request.num_computed_tokens)
        assert request.cache_state is not None and request.cache_state.novelty.length == stream._novelty.length
        for actual, reference in (
            (request.cache_state.novelty.token_indices, stream._novelty.token_indices),
            (request.cache_state.novelty.novelty, stream._novelty.novelty),
        ):
            count = stream._novelty.length
            assert torch.allclose(actual[:count].double(), reference[:count].double(), atol=1e-4)
        for layer, pot in enumerate(stream.cache.layers):
            numbers, keys, values = cached_tokens(engine, request, layer)
            assert torch.equal(numbers, pot.token_indices[:, : stream.length])
            assert torch.allclose(keys, pot.keys[:, : stream.length], atol=1e-4)
            assert torch.allclose(values, pot.values[:, : stream.length], atol=1e-4)
    assert len(request.output) == 70 and stream.num_compressions == runner_of(engine).num_compressions > 5


def test_the_answer_matches_the_stream(llama: PreTrainedModel) -> None:
    """As long as the answer fits into the stream's cache."""
    for length in (100, 131, FULL + 1):
        stream, text = streamed(llama), words(length, 4)
        stream.push(text)
        free = CAP - stream.length
        result = answers(
            bounded_engine(llama), [text], SamplingParams(max_tokens=min(free, 20), temperature=0, ignore_eos=True)
        )[0]
        fits = FULL - stream.length + 1  # before the engine compresses its own answer
        stream.model.network.generation_config.eos_token_id = None
        assert stream.answer([], len(result))[:fits].tolist() == result[:fits]


# Capacity


def test_a_conversation_of_many_times_the_cap_stays_within_it() -> None:
    engine = bounded_engine(max_num_seqs=2)
    text: list[int] = words(10)
    longest = 0
    for turn in range(12):
        text = [*text, *words(150, turn)]
        request = engine.submit(text, GREEDY)[0]
        while engine.busy:
            engine.step()
            check(engine)
            longest = max(longest, len(request.blocks))
            assert engine.state()["blocks_used"] <= BLOCKS_PER_REQUEST
        assert request.reason == "length" and len(request.output) == 16
        text = list(request.tokens)
    assert len(text) > 45 * CAP and longest == BLOCKS_PER_REQUEST
    run(engine)


def test_positions_stay_within_the_cap() -> None:
    engine, positions = bounded_engine(compiled=False), []
    network: Any = engine.model.network
    network.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, kwargs: positions.append(int((kwargs["position_ids"] if kwargs else args[1]).max())),
        with_kwargs=True,
    )
    answers(engine, texts_of([500]))
    assert CAP - len(PROMPT) <= max(positions) < CAP


def test_a_short_request_reserves_only_its_length() -> None:
    engine = bounded_engine()
    request = engine.submit(words(9), GREEDY)[0]
    engine.step()
    assert len(request.blocks) == 3
    run(engine)


def test_a_request_without_a_token_limit_ends() -> None:
    engine = bounded_engine()
    assert engine.max_request_tokens == engine.max_model_len == 2**30
    request = engine.submit(words(100), SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))[0]
    run(engine)
    assert len(request.output) == CAP and request.reason == "length"
    limited = bounded_engine(max_model_len=110)
    request = limited.submit(words(100), SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))[0]
    run(limited)
    assert len(request.tokens) == 110


# Answers do not depend on the batch


@pytest.fixture(scope="module")
def alone(llama: PreTrainedModel) -> list[list[int]]:
    return [answers(bounded_engine(llama), [text], LONG)[0] for text in texts_of(LENGTHS)]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"compiled": False},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 11},
        {"prefill_chunk_size": 5},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_a_batch_changes_no_answer(llama: PreTrainedModel, alone: list[list[int]], more: dict[str, Any]) -> None:
    engine = bounded_engine(llama, **more)
    assert answers(engine, texts_of(LENGTHS), LONG) == alone
    assert answers(engine, texts_of(LENGTHS), LONG) == alone  # on pages that were used before


def test_prompt_chunks_do_not_depend_on_the_batch() -> None:
    def cut(engine: Engine, texts: list[list[int]]) -> dict[int, list[tuple[int, int]]]:
        """Return, for each prompt by its length, where its chunks begin and their tokens."""
        chunks: dict[int, list[tuple[int, int]]] = {}
        launch = runner_of(engine).launch

        def recording_launch(step: ScheduledBatch) -> InflightBatch:
            for chunk in step.chunks:
                chunks.setdefault(len(chunk.request.prompt), []).append((chunk.start, chunk.count))
            return launch(step)

        engine.runner.launch = recording_launch  # type: ignore[method-assign]
        answers(engine, texts)
        return chunks

    texts = texts_of(LENGTHS)
    batched = cut(bounded_engine(prefill_chunk_size=9, max_num_seqs=4), texts)
    assert batched == {len(text): cut(bounded_engine(prefill_chunk_size=9), [text])[len(text)] for text in texts}


def test_answers_after_preemption(llama: PreTrainedModel, alone: list[list[int]]) -> None:
    """A cache that was compressed often, also during the answer, is dropped and recomputed."""
    engine = bounded_engine(llama, kv_cache_bytes=(BLOCKS_PER_REQUEST + 4) * BLOCK_BYTES)
    texts = texts_of(LENGTHS)
    long = engine.submit(texts[0], LONG, priority=1)[0]
    while len(long.output) < 40:
        engine.step()
    short = engine.submit(texts[1], LONG)[0]
    run(engine)
    assert (long.preemptions, short.preemptions) == (1, 0)
    assert [long.output, short.output] == alone[:2]


def test_random_requests_finish_and_leak_nothing(llama: PreTrainedModel) -> None:
    """Requests arrive, leave and continue each other at random."""
    rng = random.Random(1)
    engine, ended, came = (
        bounded_engine(llama, kv_cache_bytes=(3 * BLOCKS_PER_REQUEST + 1) * BLOCK_BYTES, max_num_batched_tokens=16),
        [],
        [],
    )
    for turn in range(400):
        if turn < 250 and rng.random() < 0.12:
            before = rng.choice(ended).tokens if ended and rng.random() < 0.5 else []
            text = [*before[: rng.randrange(len(before) + 1)], *words(rng.randrange(1, 80), turn)]
            params = SamplingParams(max_tokens=rng.randrange(1, 40), temperature=0, n=rng.randrange(1, 3))
            came += engine.submit(text, params)
        if engine.scheduler.running and rng.random() < 0.05:
            engine.abort(rng.choice(engine.scheduler.running))
        ended += [event.request for event in engine.step() if event.reason]
        check(engine)
    run(engine)
    assert len(came) > 20 and {request.reason for request in came} >= {"length", "abort"}
    checked = [request for request in ended if len(request.prompt) > FULL][:6]
    assert [
        answers(bounded_engine(llama), [request.prompt], request.sampling)[0][: len(request.output)]
        for request in checked
    ] == [request.output for request in checked]


def test_an_aborted_request_frees_everything() -> None:
    engine = bounded_engine()
    for steps in range(1, 12):
        request = engine.submit(words(200), LONG)[0]
        for _ in range(steps):
            engine.step()
        engine.abort(request)
        assert engine.pool.num_free_blocks == engine.pool.num_blocks and request.cache_state is None


def test_adapters_use_the_bounded_cache_too(llama: PreTrainedModel, tmp_path: Path) -> None:
    folder, text = write_adapter(tmp_path / "a", llama, seed=0), words(150, 2)
    engine = bounded_engine(llama, adapters={"a": folder})
    plain, changed = (engine.submit(text, LONG, adapter=name)[0] for name in (None, "a"))
    run(engine)
    assert changed.output != plain.output
    assert plain.output == answers(bounded_engine(llama), [text], LONG)[0]
    assert changed.output == answers(bounded_engine(merged(llama, folder, 2.0)), [text], LONG)[0]


# Turns


@pytest.mark.parametrize("length", [10, FULL - 3, FULL, 200])
def test_the_next_turn_continues_from_the_session_cache(llama: PreTrainedModel, length: int) -> None:
    engine, other = bounded_engine(llama), bounded_engine(llama, enable_prefix_caching=False)
    first = engine.submit(words(length), GREEDY)[0]
    while engine.busy:
        engine.step()
    text = [*first.tokens, *words(60, 1)]
    next_turns = [engine.submit(text, LONG)[0] for _ in range(2)]  # both continue the same turn
    run(engine)
    assert [request.num_cached_tokens for request in next_turns] == [length + 15] * 2
    assert [request.output for request in next_turns] == [answers(other, [text], LONG)[0]] * 2


def test_a_session_cache_needs_the_same_salt_and_tokens(llama: PreTrainedModel) -> None:
    engine = bounded_engine(llama)
    first = engine.submit(words(50), GREEDY, salt=b"a")[0]
    while engine.busy:
        engine.step()
    changed = [*first.tokens[:-1], (first.tokens[-1] + 1) % 99, 7]  # the last token differs
    requests = [engine.submit([*first.tokens, 7], GREEDY, salt=salt)[0] for salt in (b"b", b"a")]
    requests.append(engine.submit(changed, GREEDY, salt=b"a")[0])
    run(engine)
    assert [request.num_cached_tokens for request in requests] == [0, 65, 0]


def test_session_caches_are_evicted_when_memory_is_needed(llama: PreTrainedModel) -> None:
    engine = bounded_engine(llama, kv_cache_bytes=2 * BLOCKS_PER_REQUEST * BLOCK_BYTES)
    for seed in range(5):
        engine.submit(words(100, seed), GREEDY)
        while engine.busy:
            engine.step()
            check(engine)
        assert engine.state()["blocks_carried"] <= 2 * BLOCKS_PER_REQUEST
    assert len(memory_of(engine).sessions) >= 1
    run(engine)
