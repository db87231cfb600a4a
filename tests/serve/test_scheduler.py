"""Scheduler and block pool under random load: nothing leaks, no request is overtaken, every request finishes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smelt.errors import RequestError
from smelt.serve.engine.blocks import BlockPool, extend_block_hashes, root_hash
from smelt.serve.engine.kv_cache_manager import PagedCacheManager
from smelt.serve.engine.prefill_pace import PrefillPace
from smelt.serve.engine.request import Request, RequestId, RequestStatus
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.scheduler import ScheduledBatch, Scheduler


def request(name: int, prompt: list[int], answer: int, **more: object) -> Request:
    return Request(RequestId(f"{name}"), prompt, SamplingParams(temperature=0), len(prompt) + answer, **more)  # type: ignore[arg-type]


def check(scheduler: Scheduler) -> None:
    """Assert the invariants after every step."""
    pool = scheduler.cache_manager.pool
    references = Counter(block for member in scheduler.running for block in member.blocks)
    assert {block: count for block, count in enumerate(pool.references) if count} == dict(references)
    assert pool.num_free_blocks + len(references) == pool.num_blocks
    for member in scheduler.running:
        assert member.state is RequestStatus.RUNNING and len(member.blocks) >= pool.blocks_for(
            member.num_computed_tokens
        )
        assert len(set(member.blocks)) == len(member.blocks)
    for member in scheduler.waiting:
        assert member.state is RequestStatus.WAITING and not member.blocks and member.slot == -1
    slots = [member.slot for member in scheduler.running]
    assert len(set(slots)) == len(slots) and all(0 <= slot < scheduler.max_num_seqs for slot in slots)
    shared = [block for block, count in references.items() if count > 1]
    for block in shared:  # only full blocks are shared
        for member in scheduler.running:
            if block in member.blocks:
                assert (member.blocks.index(block) + 1) * pool.block_size <= member.num_computed_tokens


class Clerk:
    """Run steps with a fake model: the next token depends on all tokens before it, as a real one's does."""

    def __init__(self, scheduler: Scheduler, ahead: int, max_prompt_tokens: int | None = None) -> None:
        self.scheduler, self.ahead, self.max_prompt_tokens = scheduler, ahead, max_prompt_tokens
        self.num_inflight: list[ScheduledBatch] = []
        self.contents: dict[int, tuple[int, ...]] = {}  # block -> its tokens
        self.steps = 0

    def turn(self) -> bool:
        step = self.scheduler.schedule(self.max_prompt_tokens)
        check(self.scheduler)
        assert step.tokens <= self.scheduler.max_num_batched_tokens
        self.num_inflight.append(step)
        if len(self.num_inflight) > self.ahead or not step.chunks:
            self.read(self.num_inflight.pop(0))
        check(self.scheduler)
        self.steps += 1
        return bool(self.scheduler.running or self.scheduler.waiting or self.num_inflight)

    def read(self, step: ScheduledBatch) -> None:
        for chunk in step.chunks:
            current = chunk.request
            if not chunk.samples_token:
                self.scheduler.on_computed(current)
            elif current.state is not RequestStatus.FINISHED:
                self.scheduler.on_token(current, sum(current.tokens) * 31 % 97)
                if len(current.tokens) >= current.limit:
                    self.scheduler.finish(current, "length")


def steps_of(scheduler: Scheduler) -> list[ScheduledBatch]:
    steps, clerk = [], Clerk(scheduler, 0)
    plan = scheduler.schedule

    def recording_schedule(max_prompt_tokens: int | None = None) -> ScheduledBatch:
        steps.append(plan(max_prompt_tokens))
        return steps[-1]

    scheduler.schedule = recording_schedule  # type: ignore[method-assign]
    for _ in range(1000):
        if not clerk.turn():
            return steps
    raise AssertionError("the scheduler makes no progress")


def test_first_come_first_served() -> None:
    """An earlier request never has computed fewer steps than a later one while both are running (Orca's invariant)."""
    pool = BlockPool(1000, 4)
    scheduler = Scheduler(PagedCacheManager(pool), max_num_batched_tokens=12, max_num_seqs=3, prefill_chunk_size=8)
    requests = [request(index, [index] * (index * 7 % 20 + 1), 10) for index in range(12)]
    for member in requests:
        scheduler.add(member)
    first = {}
    for turn, step in enumerate(steps_of(scheduler)):
        for chunk in step.chunks:
            first.setdefault(chunk.request.id, turn)
    starts = [first[member.id] for member in requests]
    assert starts == sorted(starts)


def test_prompts_leave_running_answers_their_pace() -> None:
    """While an answer runs, the prompts of a step have at most so many tokens; alone, they fill it."""
    scheduler = Scheduler(PagedCacheManager(BlockPool(200, 4)), max_num_batched_tokens=64, max_num_seqs=4)
    answering = request(0, [1, 2, 3], 40)
    scheduler.add(answering)
    clerk = Clerk(scheduler, 0, max_prompt_tokens=10)
    clerk.turn()
    for index in (1, 2):
        scheduler.add(request(index, [index] * 30, 2))
    chunks = []
    while answering.state is not RequestStatus.FINISHED:
        step = scheduler.schedule(10)
        clerk.read(step)
        assert answering in [chunk.request for chunk in step.chunks]
        chunks.append([chunk.count for chunk in step.chunks if chunk.request is not answering])
    assert chunks[:8] == [[10], [10], [10], [1, 10], [10], [10], [1], []]
    scheduler.add(request(3, [5] * 60, 1))
    assert [chunk.count for chunk in scheduler.schedule(10).chunks] == [60]


def test_a_chunk_that_is_not_split_is_alone() -> None:
    """A cache manager that takes complete chunks only must not wait forever."""

    class CompleteChunks(PagedCacheManager):
        def schedulable_tokens(self, request: Request, budget: int, chunk_size: int) -> int:
            count = super().schedulable_tokens(request, 10**6, chunk_size)
            return count if count <= budget else 0

    scheduler = Scheduler(
        CompleteChunks(BlockPool(200, 4)), max_num_batched_tokens=64, max_num_seqs=4, prefill_chunk_size=16
    )
    scheduler.add(request(0, [1, 2, 3], 40))
    clerk = Clerk(scheduler, 0)
    clerk.turn()
    for index in (1, 2):
        scheduler.add(request(index, [index] * 16, 1))
    for _ in range(2):
        step = scheduler.schedule(10)
        clerk.read(step)
        assert sorted(chunk.count for chunk in step.chunks) == [1, 16]


def test_the_pace_of_prompts_follows_what_was_measured() -> None:
    pace = PrefillPace(0.5)
    assert pace.max_tokens == 32
    for _ in range(20):
        pace.record(100, 0.1)
        pace.record(4, 10.0)  # says nothing about prompts
    assert pace.max_tokens == pytest.approx(500, abs=2)
    pace.record(100, 1.0)  # slower: counts at once
    assert pace.max_tokens == 50
    pace.record(100, 100.0)
    assert pace.max_tokens == 16


def test_a_large_request_is_not_overtaken() -> None:
    pool = BlockPool(10, 4, enable_prefix_caching=False)
    scheduler = Scheduler(PagedCacheManager(pool), max_num_batched_tokens=64, max_num_seqs=8, watermark=0)
    holder, large, small = request(0, [1] * 20, 12), request(1, [2] * 32, 4), request(2, [3], 2)
    for member in (holder, large, small):
        scheduler.add(member)
    step = scheduler.schedule()
    assert [chunk.request for chunk in step.chunks] == [holder]  # 5 blocks are left, the large one needs 8


def test_a_lower_priority_number_runs_first_and_is_preempted_last() -> None:
    scheduler = Scheduler(
        PagedCacheManager(BlockPool(8, 4, enable_prefix_caching=False)), max_num_batched_tokens=64, max_num_seqs=1
    )
    late = request(1, [2] * 4, 4, priority=-1)
    scheduler.add(request(0, [1] * 4, 4))
    scheduler.add(late)
    assert [chunk.request for chunk in scheduler.schedule().chunks] == [late]


def test_preemption_takes_the_last_request_and_keeps_its_tokens() -> None:
    scheduler = Scheduler(
        PagedCacheManager(BlockPool(4, 2, enable_prefix_caching=False)),
        max_num_batched_tokens=64,
        max_num_seqs=4,
        watermark=0,
    )
    first, second = request(0, [1, 2, 3], 5), request(1, [4, 5, 6], 5)
    for member in (first, second):
        scheduler.add(member)
    steps = steps_of(scheduler)
    preempted = [step for step in steps if step.preempted]
    assert [step.preempted for step in preempted] == [[second]]
    assert not any(chunk.request is second for chunk in preempted[0].chunks)  # nor admitted again in the same step
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert len(second.output) == 5


def test_blocks_for_the_answer_are_reserved_after_a_long_prefill() -> None:
    """Of two requests with prompts of 32 blocks and answers of 3 in 68 blocks one waits, so that neither is prefilled
    twice; two short prompts, which are cheap to recompute, run at once and one is preempted.
    """
    scheduler = Scheduler(
        PagedCacheManager(BlockPool(68, 2, enable_prefix_caching=False)), max_num_batched_tokens=256, max_num_seqs=4
    )
    long = [request(name, [name] * 64, 6) for name in range(2)]
    for item in long:
        scheduler.add(item)
    steps = steps_of(scheduler)
    assert [item.preemptions for item in long] == [0, 0] and max(len(step.chunks) for step in steps) == 1
    enough = Scheduler(
        PagedCacheManager(BlockPool(71, 2, enable_prefix_caching=False)), max_num_batched_tokens=256, max_num_seqs=4
    )
    for name in range(2):
        enough.add(request(name, [name] * 64, 6))
    assert len(enough.schedule().chunks) == 2  # 32 + 3 for each, and one spare
    scheduler = Scheduler(
        PagedCacheManager(BlockPool(12, 2, enable_prefix_caching=False)),
        max_num_batched_tokens=64,
        max_num_seqs=4,
        watermark=0,
    )
    short = [request(name, [name] * 6, 12) for name in range(2)]
    for item in short:
        scheduler.add(item)
    assert len(steps_of(scheduler)[0].chunks) == 2 and short[1].preemptions > 0


@pytest.mark.parametrize(("prompt", "admitted"), [(58, 2), (59, 1)])
def test_the_watermark_stays_free_while_others_run(prompt: int, admitted: int) -> None:
    """Of 100 blocks 10 stay free: the first request needs 31 with its answer, so that the second may have 59."""
    pool = BlockPool(100, 1, enable_prefix_caching=False)
    scheduler = Scheduler(PagedCacheManager(pool), max_num_batched_tokens=256, watermark=0.1)
    scheduler.add(request(0, [1] * 30, 1))
    scheduler.add(request(1, [2] * prompt, 1))
    assert len(scheduler.schedule().chunks) == admitted


def test_prefill_chunks_run_beside_decoding() -> None:
    scheduler = Scheduler(PagedCacheManager(BlockPool(100, 4)), max_num_batched_tokens=5, max_num_seqs=4)
    scheduler.add(request(0, [1, 2], 6))
    steps = [scheduler.schedule()]
    Clerk(scheduler, 0).read(steps[0])
    scheduler.add(request(1, list(range(11)), 2))
    step = scheduler.schedule()
    assert [(chunk.start, chunk.count, chunk.samples_token) for chunk in step.chunks] == [(2, 1, True), (0, 4, False)]


def test_a_cached_prefix_never_covers_the_full_prompt() -> None:
    pool = BlockPool(100, 4)
    scheduler = Scheduler(PagedCacheManager(pool))
    first, again, longer = request(0, list(range(8)), 3), request(1, list(range(8)), 3), request(2, list(range(12)), 3)
    other = request(3, list(range(12)), 3, salt=b"another key")
    for member in (first, again, longer, other):
        scheduler.add(member)
        steps_of(scheduler)
    assert [member.num_cached_tokens for member in (first, again, longer, other)] == [0, 4, 8, 0]


def test_the_prefix_cache_can_be_disabled() -> None:
    scheduler = Scheduler(PagedCacheManager(BlockPool(100, 4, enable_prefix_caching=False)))
    for index in range(2):
        submitted = request(index, list(range(20)), 2)
        scheduler.add(submitted)
        steps_of(scheduler)
        assert submitted.num_cached_tokens == 0


def test_samples_share_the_blocks_of_their_prompt_without_a_prefix_cache() -> None:
    pool = BlockPool(100, 4, enable_prefix_caching=False)
    scheduler = Scheduler(PagedCacheManager(pool))
    parent = request(0, list(range(10)), 4)
    child = request(1, list(range(10)), 4, parent=parent)
    for sample in (parent, child):
        scheduler.add(sample)
    clerk = Clerk(scheduler, 0)
    clerk.turn()
    clerk.turn()
    assert child.blocks[:2] == parent.blocks[:2] and child.blocks[2] != parent.blocks[2]
    assert pool.num_blocks - pool.num_free_blocks == 4


def test_least_recently_freed_blocks_are_evicted_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, 2)
    text = pool.allocate(3)
    for index, block in enumerate(text):
        pool.cache_block(block, bytes([index]))
    pool.release(text)
    pool.allocate(2)  # the never used block, then the tail
    assert pool.find_prefix([bytes([0]), bytes([1]), bytes([2])]) == text[:2]


def test_double_free_and_over_allocation_are_errors() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="twice"):
        pool.release(blocks)
    with pytest.raises(RuntimeError, match="free"):
        pool.allocate(3)


def test_block_hashes_depend_on_the_prefix_salt_and_adapter() -> None:
    base = extend_block_hashes([1, 2, 3, 4, 5], 2, [], root_hash(b"", None))
    assert len(base) == 2
    assert extend_block_hashes([9, 2, 3, 4], 2, [], root_hash(b"", None))[1] != base[1]
    assert extend_block_hashes([1, 2], 2, [], root_hash(b"a", None))[0] != base[0]
    assert extend_block_hashes([1, 2], 2, [], root_hash(b"", "a"))[0] != base[0]
    assert root_hash(b"a", "b") != root_hash(b"ab", "")


def test_a_full_queue_and_a_prompt_larger_than_the_cache_are_refused() -> None:
    scheduler = Scheduler(PagedCacheManager(BlockPool(4, 4)), max_queued=1)
    with pytest.raises(RequestError, match="longer than the cache"):
        scheduler.add(request(0, [1] * 16, 1))
    scheduler.add(request(0, [1] * 15, 1))
    with pytest.raises(RequestError, match="waiting already"):
        scheduler.add(request(1, [1], 1))


def test_the_blocks_in_use_are_counted() -> None:
    manager = PagedCacheManager(BlockPool(10, 4))
    scheduler = Scheduler(manager)
    scheduler.add(request(0, [1] * 9, 1))
    scheduler.schedule()
    assert manager.state() == {"blocks": 10, "blocks_used": 3}


def test_a_request_never_outgrows_the_cache() -> None:
    scheduler = Scheduler(PagedCacheManager(BlockPool(4, 4)))
    only = request(0, [1] * 10, 1000)
    scheduler.add(only)
    steps_of(scheduler)
    assert len(only.tokens) == 16 and only.reason == "length"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(8, 40),
    size=st.sampled_from([1, 2, 4, 16]),
    max_num_batched_tokens=st.integers(1, 40),
    max_num_seqs=st.integers(1, 6),
    prefill_chunk_size=st.sampled_from([None, 1, 3, 8]),
    prefix=st.booleans(),
    ahead=st.integers(0, 2),
)
def test_random_requests(
    seed: int,
    blocks: int,
    size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    prefill_chunk_size: int | None,
    prefix: bool,
    ahead: int,
) -> None:
    rng = random.Random(seed)
    pool = BlockPool(blocks, size, enable_prefix_caching=prefix)
    scheduler = Scheduler(
        PagedCacheManager(pool),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        prefill_chunk_size=prefill_chunk_size,
    )
    clerk, requests = Clerk(scheduler, ahead), []
    beginning = [rng.randrange(5) for _ in range(20)]
    for turn in range(4000):
        if turn < 40 and rng.random() < 0.5:
            prompt = beginning[: rng.randrange(20)] + [rng.randrange(5) for _ in range(rng.randrange(1, 10))]
            if pool.blocks_for(len(prompt) + 1) <= blocks:
                parent = rng.choice(requests) if requests and rng.random() < 0.2 else None
                new = request(turn, prompt if parent is None else parent.prompt, rng.randrange(1, 12), parent=parent)
                new.priority = rng.randrange(2)
                requests.append(new)
                scheduler.add(new)
        if requests and rng.random() < 0.05:
            scheduler.finish(rng.choice(requests), "abort")
            check(scheduler)
        if not clerk.turn() and turn >= 40:
            break
    assert all(member.state is RequestStatus.FINISHED for member in requests)
    assert pool.num_free_blocks == blocks and not any(pool.references)
    for member in requests:
        expected = list(member.prompt)
        while len(expected) < len(member.tokens):
            expected.append(sum(expected) * 31 % 97)
        assert member.tokens == expected  # no token lost or repeated, also after preemption
        if member.reason == "length":
            assert len(member.tokens) == member.limit
