"""An engine with sparse page attention: with all pages it gives the plain engine's tokens, with fewer the same wherever
pages are stored; the device holds a bounded number of pages, and none of finished requests.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from smelt.errors import ConfigError, ModelError
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.kvcache.selection.page_cache import OffloadConfig
from smelt.kvcache.selection.page_summary import ArkVale, Quest
from smelt.kvcache.selection.trace import read_trace
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.engine.sparse_runner import SparseRunner
from tests.models.test_surgery import cut, random_masks
from tests.serve.test_adapters import merged, write_adapter
from tests.serve.test_engine import GREEDY, SMALL, answers, expected, prompts, run
from tests.tiny import BUILDS
from tests.trained import sentences, trained_llama

ALL = SparseAttentionConfig(page_size=4, token_budget=96, sink_pages=1, recent_pages=1)
FEW = SparseAttentionConfig(page_size=4, token_budget=12, sink_pages=1, recent_pages=1)
BLOCK_BYTES = 3 * 2 * 4 * 2 * 8 * 4
TIGHT = OffloadConfig(
    num_slots=24, keep_steps=3, refresh_interval=2
)  # one request of maximum length, or a few short ones at once
OFFLOADS = [None, OffloadConfig(keep_steps=2), TIGHT, OffloadConfig(num_slots=24, keep_steps=0)]


def selecting(
    network: PreTrainedModel, selection: SparseAttentionConfig, offload: OffloadConfig | None = None,
    record: bool = False, device: str = "cpu", **more: Any,
) -> tuple[Engine, SparseRunner]:  # fmt: skip
    engine = Engine(Model(copy.deepcopy(network).to(device)), **{**SMALL, **more})
    runner = SparseRunner(
        engine.model,
        num_blocks=engine.pool.num_blocks,
        block_size=engine.pool.block_size,
        max_num_batched_tokens=engine.scheduler.max_num_batched_tokens,
        max_num_seqs=engine.scheduler.max_num_seqs,
        max_model_len=engine.max_model_len,
        adapters=engine.adapters,
        selection=selection,
        kv_offload=offload,
        record=record,
    )
    engine.runner = runner
    return engine, runner


@pytest.fixture(scope="module")
def llama() -> tuple[PreTrainedModel, list[list[int]]]:
    """Return a trained network, whose answers differ, and the plain engine's answers."""
    network = copy.deepcopy(trained_llama(sentences(400)))
    return network, answers(Engine(Model(copy.deepcopy(network)), **SMALL), prompts())


@pytest.mark.parametrize("offload", OFFLOADS, ids=str)
@pytest.mark.parametrize(
    "more", [{}, {"prefill_chunk_size": 5}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}], ids=str
)
def test_with_all_pages_it_matches_the_plain_engine(
    llama: tuple[PreTrainedModel, list[list[int]]], offload: OffloadConfig | None, more: dict[str, Any]
) -> None:
    network, reference = llama
    engine, _ = selecting(network, ALL, offload, **more)
    assert answers(engine, prompts()) == reference
    assert answers(engine, prompts()) == reference  # on blocks that were used before, some from the prefix cache


@pytest.fixture(scope="module")
def long_answers(llama: tuple[PreTrainedModel, list[list[int]]]) -> list[list[int]]:
    return [expected(llama[0], text, 30) for text in prompts(6, 3)]


@pytest.mark.parametrize("offload", OFFLOADS, ids=str)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_after_preemption(
    llama: tuple[PreTrainedModel, Any],
    long_answers: list[list[int]],
    offload: OffloadConfig | None,
    enable_prefix_caching: bool,
) -> None:
    network, _ = llama
    texts, long = prompts(6, 3), SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    engine, runner = selecting(
        network,
        ALL,
        offload,
        kv_cache_bytes=24 * BLOCK_BYTES,
        enable_prefix_caching=enable_prefix_caching,
        max_num_seqs=3,
    )
    requests = [engine.submit(text, long)[0] for text in texts]
    run(engine)
    assert sum(request.preemptions for request in requests) > 0
    assert [request.output for request in requests] == long_answers
    assert runner.resident_pages == 0


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama-tied", "qwen2", "qwen3"])
def test_every_family_without_sliding_windows(name: str) -> None:
    network = BUILDS[name]()
    engine, _ = selecting(network, ALL, TIGHT)
    assert answers(engine, prompts()) == [expected(network, prompt) for prompt in prompts()]


@pytest.mark.parametrize("empty", [(), ("heads0",)])
def test_a_pruned_network_with_per_layer_widths(empty: tuple[str, ...], tmp_path: Path) -> None:
    network = BUILDS["llama"]()
    cut(network, random_masks(network, empty=empty))
    engine, runner = selecting(network, ALL, TIGHT, record=True)
    assert answers(engine, prompts()) == [expected(network, prompt) for prompt in prompts()]
    assert runner.recorder is not None
    runner.recorder.trace().write(tmp_path / "run.trace")
    shape = read_trace(tmp_path / "run.trace").metadata
    assert len(shape.kv_heads) == 3 and (shape.kv_heads[0] == 0) == bool(empty)


def test_a_half_precision_network() -> None:
    network = BUILDS["llama"]().to(torch.bfloat16)
    reference = answers(Engine(Model(copy.deepcopy(network)), compiled=False, **SMALL), prompts())
    assert [answers(selecting(network, ALL, device)[0], prompts()) for device in OFFLOADS] == [reference] * len(
        OFFLOADS
    )


def test_adapters(tmp_path: Path) -> None:
    network, text = BUILDS["llama"](), prompts()[0]
    folder = write_adapter(tmp_path / "a", network, seed=0)
    engine, _ = selecting(network, ALL, TIGHT, adapters={"a": folder})
    plain, changed = (engine.submit(text, GREEDY, adapter=name)[0] for name in (None, "a"))
    run(engine)
    assert plain.output == expected(network, text)
    assert changed.output == expected(merged(network, folder, 8 / 4), text) != plain.output


@pytest.mark.parametrize("digest", [Quest(), ArkVale()], ids=str)
def test_a_few_pages_wherever_they_are_stored(
    llama: tuple[PreTrainedModel, list[list[int]]], digest: Quest | ArkVale
) -> None:
    """The selection does not depend on which pages are on the device, nor on the rest of the batch."""
    network, _ = llama
    selection = SparseAttentionConfig(digest, page_size=4, token_budget=12, sink_pages=1, recent_pages=1)
    long = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    results = [answers(selecting(network, selection, device)[0], prompts(4), long) for device in OFFLOADS]
    alone = [answers(selecting(network, selection)[0], [text], long)[0] for text in prompts(4)]
    assert all(tokens == alone for tokens in results)
    assert (
        answers(selecting(network, selection, prefill_chunk_size=1)[0], prompts(4), long) == alone
    )  # prefill uses full attention
    assert alone != answers(Engine(Model(copy.deepcopy(network)), **SMALL), prompts(4), long)  # pages were left out


def test_the_device_never_exceeds_its_slots_and_copies_less_when_pages_stay(
    llama: tuple[PreTrainedModel, list[list[int]]],
) -> None:
    copied = {}
    for steady in (0, 1, 6):
        engine, runner = selecting(llama[0], FEW, OffloadConfig(num_slots=20, keep_steps=steady))
        for text in prompts():
            engine.submit(text, GREEDY)
        peak = 0
        while engine.busy:
            engine.step()
            assert runner.host is not None
            counts = [int((resident.block_in >= 0).sum(1).max()) for resident in runner.host.residents.values()]
            peak = max(peak, *counts)
            assert peak <= 20 and all(resident.block_in.shape == (2, 20) for resident in runner.host.residents.values())
        assert (peak > 0) == (steady > 0)
        copied[steady] = runner.host.recalled_bytes
    assert copied[0] > copied[1] > copied[6] > 0


def test_no_pages_of_finished_or_waiting_requests_are_kept(llama: tuple[PreTrainedModel, Any]) -> None:
    """Random aborts and preemptions: at every check, only blocks of running requests are on the device."""
    engine, runner = selecting(
        llama[0], FEW, OffloadConfig(num_slots=64, keep_steps=1000), kv_cache_bytes=30 * BLOCK_BYTES
    )
    rng, peak = random.Random(0), 0
    long = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    requests = [engine.submit(text, long)[0] for text in prompts(12)]
    while engine.busy:
        engine.step()
        if rng.random() < 0.1:
            engine.abort(rng.choice(requests))
        peak = max(peak, runner.resident_pages)
        running = {block for request in engine.scheduler.running for block in request.blocks}
        assert runner.host is not None
        for residents in runner.host.residents.values():
            assert set(residents.block_in.flatten().tolist()) <= running | {-1}
    assert {request.reason for request in requests} == {"abort", "length"} and peak > 0
    assert sum(request.preemptions for request in requests) > 0
    assert runner.resident_pages == 0 and not runner._tracked_blocks


def test_the_trace_of_a_run(llama: tuple[PreTrainedModel, Any], tmp_path: Path) -> None:
    """One row per decoded token, layer and head; most pages are those of the step before."""
    texts = [prompts()[0] + prompts()[1], prompts()[2]]
    engine, runner = selecting(
        llama[0],
        SparseAttentionConfig(page_size=4, token_budget=20, sink_pages=1, recent_pages=1),
        OffloadConfig(keep_steps=1),
        record=True,
    )
    requests = [engine.submit(text, GREEDY)[0] for text in texts]
    run(engine)
    assert runner.recorder is not None and runner.host is not None
    runner.recorder.trace().write(tmp_path / "run.trace")
    trace = read_trace(tmp_path / "run.trace")
    rows = list(trace.rows())
    assert len(rows) == 2 * 15 * 3 * 2 and {row.request for row in rows} == {str(request.id) for request in requests}
    assert trace.metadata.page_bytes == 4 * 2 * 8 * 4 and trace.metadata.summary_bytes == 2 * 8 * 4
    assert sum(len(row.recalled) for row in rows) * trace.metadata.page_bytes == runner.host.recalled_bytes
    before: dict[tuple[str, int, int], set[int]] = {}
    shared = []
    for row in rows:
        length = (
            next(len(candidate.prompt) for candidate in requests if str(candidate.id) == row.request) + row.step - 1
        )
        num_pages = -(-length // 4)
        assert (
            len(row.pages) == min(num_pages, 5)
            and {0, num_pages - 1} <= set(row.pages)
            and list(row.pages) == sorted(row.pages)
        )
        last = before.get((row.request, row.layer, row.head), set())
        assert set(row.recalled) == set(row.pages) - last  # only those of the last step stayed
        if last and num_pages > 5:
            shared.append(len(last & set(row.pages)) / len(row.pages))
        before[row.request, row.layer, row.head] = set(row.pages)
    assert sum(shared) / len(shared) > 0.5


def test_unsupported_settings() -> None:
    network = BUILDS["llama"]()
    with pytest.raises(ConfigError, match="page_size is 32, and the engine's block_size is 4; set block_size to 32"):
        selecting(network, SparseAttentionConfig())
    with pytest.raises(
        ConfigError, match="up to 24 pages of one request, and the device has 8 slots for it; configure more"
    ):
        selecting(network, ALL, OffloadConfig(num_slots=8))
    sliding = BUILDS["mistral"]()
    with pytest.raises(ModelError, match="sliding-window layers"):
        selecting(sliding, ALL)


def test_a_growing_budget_needs_slots_for_the_longest_text() -> None:
    growing = SparseAttentionConfig(page_size=4, token_budget=8, budget_ratio=0.5, sink_pages=1, recent_pages=1)
    with pytest.raises(ConfigError, match="up to 12 pages"):
        selecting(BUILDS["llama"](), growing, OffloadConfig(num_slots=11))
    selecting(BUILDS["llama"](), growing, OffloadConfig(num_slots=12))


@pytest.mark.gpu
@pytest.mark.parametrize("offload", OFFLOADS, ids=str)
def test_on_a_gpu(llama: tuple[PreTrainedModel, list[list[int]]], offload: OffloadConfig | None) -> None:
    network, reference = llama
    engine, runner = selecting(network, ALL, offload, device="cuda", compiled=False)
    assert answers(engine, prompts()) == reference
    if runner.host is not None:
        assert runner.host._keys[0].is_pinned() and runner.host._key_slots[0].is_cuda
    results = [
        answers(selecting(network, FEW, device, device="cuda", compiled=False)[0], prompts()) for device in OFFLOADS
    ]
    assert all(tokens == results[0] for tokens in results)
    torch.cuda.synchronize()


def test_an_engine_takes_a_selection_config() -> None:
    """By fields, as sent by another process; the selected pages are blocks."""
    engine = Engine(
        Model(BUILDS["llama"]()),
        max_model_len=96,
        kv_cache_bytes=10**7,
        page_selection={"page_size": 4, "token_budget": 96},
    )
    assert engine.pool.block_size == 4 and isinstance(engine.runner, SparseRunner) and engine.runner.host is None
    plain = Engine(Model(BUILDS["llama"]()), block_size=4, max_model_len=96, kv_cache_bytes=10**7)
    texts = [[5, 6, 7, 8] * 9, [9, 10, 11]]
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    answers = [[engine.submit(text, sampling)[0] for text in texts] for engine in (engine, plain)]
    for member in (engine, plain):
        while member.busy:
            member.step()
    assert [request.output for request in answers[0]] == [request.output for request in answers[1]]
    selection = {"page_size": 4, "token_budget": 24}
    host = Engine(
        Model(BUILDS["llama"]()),
        max_model_len=96,
        kv_cache_bytes=10**7,
        page_selection=selection,
        kv_offload={"num_slots": 64},
    )
    assert isinstance(host.runner, SparseRunner) and host.runner.host is not None
    assert [member.runner.backend for member in (engine, host)] == [
        "eager, sparse page attention", "eager, sparse page attention from host memory",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="not both"):
        Engine(Model(BUILDS["llama"]()), page_selection=selection, kv_profile="profile.json")
    with pytest.raises(ModelError, match="several devices"):
        Engine(Model(BUILDS["llama"]()), page_selection=selection, tensor_parallel_size=2)
