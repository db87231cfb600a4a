"""Pages of head clusters on a GPU, or under Triton's interpreter: the same tokens as the module on the same pages."""

from __future__ import annotations

import copy
import heapq
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before anything imports Triton)

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.gpu.paged import DecodeMetadata, paged_decode
from smelt.kernels.gpu.pages import ClusteredHeadPages
from smelt.kernels.gpu.rope import RotaryParams, rope_and_store_kv
from smelt.kernels.kv_quant import INT3, INT4, INT8, KVQuantFormat
from smelt.kernels.paged import paged_attention_reference
from smelt.kvcache.eviction.scorer import AttentionInputs, last_query_logits
from smelt.kvcache.eviction.scorers import make_scorer
from smelt.models.model import Model
from smelt.serve.engine import factory
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.factory import per_head_gpu_runner
from smelt.serve.engine.per_head.kv_splits import OVERHEAD, PROGRAMS_PER_SM, build_split_work, choose_num_splits
from smelt.serve.engine.sampling_params import SamplingParams
from tests.serve.per_head.test_per_head_engine import SMALL, check, prompts, retention, run, words
from tests.serve.test_adapters import write_adapter
from tests.tiny import BUILDS

FEW = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


def engine_of(monkeypatch: pytest.MonkeyPatch, name: str, **more: Any) -> Engine:
    """Build an engine with the fused backend, also without a CUDA device."""

    def select_runner(parts: Any, cache: Any, policy: Any, _: int) -> Any:
        return per_head_gpu_runner(parts, cache, policy)

    with monkeypatch.context() as patch:
        patch.setattr(factory, "per_head_runner", select_runner)
        return Engine(Model(copy.deepcopy(BUILDS[name]()).to(DEVICE)), **{**SMALL, **more})


EVERYTHING, LITTLE = [1.0, 1.0, 1.0], [0.5, 0.2, 0.0]


@pytest.mark.parametrize(
    ("name", "shares", "kv_cache_dtype"),
    [
        *[(name, shares, None) for name in ("llama", "qwen3") for shares in (EVERYTHING, LITTLE)],
        ("llama", LITTLE, INT4),
        ("llama", LITTLE, INT3),
    ],
)
def test_the_tokens_match_the_module(
    monkeypatch: pytest.MonkeyPatch, name: str, shares: list[float], kv_cache_dtype: str | None
) -> None:
    scorer = (
        None if kv_cache_dtype is None else make_scorer("snapkv", window=4)
    )  # its queries must have the dtype of its keys
    settings: dict[str, Any] = {
        "kv_profile": retention(shares, scorer=scorer),
        "max_num_batched_tokens": 24,
        "kv_cache_dtype": kv_cache_dtype,
    }
    texts = prompts(3, seed=1, max_length=60) if kv_cache_dtype is None else [words(28, seed=4)]
    fused = engine_of(monkeypatch, name, **settings)
    assert fused.runner.backend.startswith("fused-gpu, per-head cache")
    plain = Engine(Model(BUILDS[name]()), **SMALL, **settings)
    requests = [[engine.submit(text, FEW)[0] for text in texts] for engine in (fused, plain)]
    run(fused)
    run(plain)
    assert [request.output for request in requests[0]] == [request.output for request in requests[1]]
    if kv_cache_dtype is not None:  # the same tokens were kept, in the same slots
        fused_cache, plain_cache = fused.runner.pages.cache, plain.runner.cache
        assert int((fused_cache.keys.cpu() != plain_cache.keys).any(-1).sum()) <= 8
        assert int((fused_cache.values.cpu() != plain_cache.values).any(-1).sum()) <= 8


def test_adapters_beside_the_base_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", BUILDS["llama"](), seed=0)
    settings: dict[str, Any] = {"kv_profile": retention(LITTLE), "max_num_batched_tokens": 24}
    settings["adapters"] = {"adapter": folder}
    fused = engine_of(monkeypatch, "llama", **settings)
    plain = Engine(Model(BUILDS["llama"]()), **SMALL, **settings)
    text = words(28, seed=4)
    outputs = []
    for engine in (fused, plain):
        requests = [engine.submit(text, FEW, adapter=name)[0] for name in ("adapter", None)]
        run(engine)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1] and outputs[0][0] != outputs[0][1]


def test_a_conversation_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"kv_profile": retention([0.6, 0.3, 0.0]), "max_num_batched_tokens": 24}
    engines = [engine_of(monkeypatch, "llama", **settings), Engine(Model(BUILDS["llama"]()), **SMALL, **settings)]
    outputs = []
    for engine in engines:
        text = words(80, seed=9)
        for _ in range(3):
            requests = [engine.submit(text, FEW)[0] for _ in range(2)]
            while engine.busy:
                engine.step()
                check(engine)
            text = [*text, *requests[0].output, 11, 12]
            outputs.append([request.output for request in requests])
        assert engine.state()["cached_tokens"] > 0
        run(engine)
    assert outputs[:3] == outputs[3:]


@pytest.mark.parametrize("many", [1, 256])
@pytest.mark.parametrize(
    ("parts", "kv_cache_dtype"),
    [([1, 1, 1], None), ([4, 1, 2], None), ([3, 5, 1], None), ([4, 1, 2], INT8), ([4, 1, 2], INT3)],
)
def test_heads_of_different_lengths_in_one_call(
    parts: list[int], kv_cache_dtype: str | None, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three heads in three clusters, in different columns, against a loop over heads."""
    monkeypatch.setattr("smelt.kernels.gpu.rope.MANY_TOKENS", many)
    torch.manual_seed(0)
    size, heads, kv_heads, width, columns, clusters = 16, 6, 3, 24, 4, 5
    rows = None if kv_cache_dtype is None else KVQuantFormat.for_head_dim(kv_cache_dtype, width)
    keys, values = (torch.randn(160 * columns, size, 1, width, device=DEVICE) for _ in range(2))
    if rows is not None:
        keys, values = rows.quantize(keys), rows.quantize(values)
    tables = torch.randperm(160)[:150].view(3, clusters, 10).int().to(DEVICE)
    texts = torch.tensor([150, 40, 0], device=DEVICE)
    slots = torch.tensor([2, 0, 1], device=DEVICE)
    shifts = torch.zeros(3, clusters, dtype=torch.int32, device=DEVICE)
    shifts[2] = torch.tensor([0, -100, -30, -149, -60])
    shifts[0] = torch.tensor([0, -39, -10, -20, -7])
    cluster, column = torch.tensor([3, 1, 4], device=DEVICE), torch.tensor([2, 0, 3], device=DEVICE)
    work = [(head, part, count) for head, count in enumerate(parts) for part in range(count)]
    head_pages = ClusteredHeadPages(
        tables, shifts, cluster, column, columns, torch.tensor(work, dtype=torch.int32, device=DEVICE)
    )
    rotation = RotaryParams(torch.randn(150, width, device=DEVICE), torch.randn(150, width, device=DEVICE))
    qkv = torch.randn(3, (heads + 2 * kv_heads) * width, device=DEVICE)
    others = [keys.clone(), values.clone()]
    queries = rope_and_store_kv(
        qkv, (texts - 1).clamp(min=0), torch.where(texts > 0, slots, -1), rotation, *others, head_pages, rows
    )
    split_counter = torch.zeros(3 * kv_heads, dtype=torch.int32, device=DEVICE)
    tokens = DecodeMetadata(slots, texts, tables, split_counter, 150)
    max_parts = 1 << (max(parts) - 1).bit_length()
    actual = paged_decode(
        qkv, keys, values, tokens, rotation, 0.2, head_pages=head_pages, splits=max_parts, kv_quant=rows
    )
    actual = actual.view(3, heads, width)
    for request in range(2):
        for head in range(kv_heads):
            slot, which = int(slots[request]), int(cluster[head])
            length = int(texts[request] + shifts[slot, which])
            table = (tables[slot, which] * columns + column[head]).int()[None]
            one = AttentionMetadata(
                torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32), table, table,
                length, [1],
            )  # fmt: skip
            query_heads = slice(2 * head, 2 * head + 2)
            expected = paged_attention_reference(
                queries[request : request + 1, query_heads], keys, values, one, 0.2, kv_quant=rows
            )
            assert torch.allclose(actual[request, query_heads], expected[0], atol=1e-4), (request, head)
    assert bool((actual[2] == 0).all()) and not bool(split_counter.any())
    assert torch.allclose(keys.float(), others[0].float(), atol=1e-6 if rows is None else 1)
    assert torch.equal(values, others[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_last_queries_are_scored_in_the_dtype_of_the_keys(dtype: torch.dtype) -> None:
    """Products of 16-bit numbers are those of float32, and so are the observed scores."""
    torch.manual_seed(4)
    keys, queries = torch.randn(1, 2, 300, 32).to(dtype), torch.randn(1, 6, 40, 32).to(dtype)
    per_device = [
        AttentionInputs(
            keys.to(device),
            keys.to(device),
            queries[:, :, :0],
            lambda x, at: x,
            0.2,
            rotated_queries=queries.to(device),
        )
        for device in (DEVICE, "cpu")
    ]
    actual, expected = (last_query_logits(inputs, 32) for inputs in per_device)
    assert actual.dtype == torch.float32 and torch.allclose(actual.cpu(), expected, atol=1e-4)


def test_splits_follow_budgets() -> None:
    assert choose_num_splits((8, 4), 1, 6) == (16, 8)  # as many as there are slots
    assert choose_num_splits((8, 4), 1, 6, max_splits=4) == (4, 2)
    assert choose_num_splits((8, 7) * 4, 528, 132) == (1,) * 8  # enough programs without splitting
    long, *others = choose_num_splits((64, 1, 1, 1), 40, 132)  # one long head does not delay the others
    assert long >= 6 and set(others) == {1}


@pytest.mark.parametrize("requests", [1, 3, 4, 16, 33, 64, 200])
def test_no_other_split_would_finish_earlier(requests: int) -> None:
    """Simulate programs starting in the order of `build_split_work`, each as soon as a slot is free."""
    shares = (64, 33, 17, 17, 7, 7, 4, 4)

    def ends(parts: tuple[int, ...]) -> float:
        free_at = [0.0] * PROGRAMS_PER_SM * 132
        for head, _, count in build_split_work(shares, parts):
            for _ in range(requests):
                heapq.heapreplace(free_at, free_at[0] + shares[head] / count / 64 + OVERHEAD)
        return max(free_at)

    end = ends(choose_num_splits(shares, requests, 132))
    assert end <= 1.01 * min(ends((count,) * 8) for count in (1, 2, 4, 8, 16, 32))
    assert end < 1.35 * (requests * sum(shares) / 64 / (PROGRAMS_PER_SM * 132)) or requests < 4


def test_long_splits_start_first_and_each_occurs_once() -> None:
    shares, parts = [10, 64, 30], [1, 4, 3]
    work = build_split_work(shares, parts)
    assert [shares[head] / count for head, _, count in work] == [16] * 4 + [10] * 4
    assert sorted(work) == [(head, part, count) for head, count in enumerate(parts) for part in range(count)]
