"""Quantized KV cache: transformers' tokens with a cache in the same format on every runner; eviction, bounded caches
and page selection work as on plain pages; and more tokens fit.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from smelt.cli.app import call, program
from smelt.errors import ConfigError, ModelError, SmeltError
from smelt.kernels import paged
from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.cpu.build import load_library
from smelt.kernels.cpu.program import can_run
from smelt.kernels.dispatch import CPU
from smelt.kernels.kv_quant import CLIP, FP8, INT3, INT4, INT8, KV_QUANT_DTYPES, KVQuantFormat, quantize_qkv
from smelt.kernels.paged import paged_attention, paged_attention_reference, store_kv
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.kvcache.selection.page_cache import OffloadConfig
from smelt.kvcache.streaming import InfiniPot
from smelt.kvcache.streaming.config import BoundedCacheConfig
from smelt.kvcache.streaming.infinipot import InfiniPotCompressor
from smelt.models.kv_cache import KVCacheFormat
from smelt.models.model import Model
from smelt.serve.engine.attention import PagedCache, block_bytes
from smelt.serve.engine.bounded.pages import BoundedCachePages
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.kv_dtype import resolve_kv_cache_dtype
from smelt.serve.engine.per_head.cache_manager import PerHeadCacheManager
from smelt.serve.engine.sampling_params import SamplingParams
from tests.serve.per_head.test_per_head_engine import retention
from tests.serve.test_engine import GREEDY, SMALL, answers, prompts
from tests.tiny import BUILDS
from tests.trained import sentences, trained_llama

SAME = {
    INT8: KVCacheFormat("int8"),
    FP8: KVCacheFormat("fp8-e4m3"),
    INT4: KVCacheFormat("int4-asym/row@float16", None, CLIP[INT4], rotate_keys=True, rotate_values=True),
    INT3: KVCacheFormat("int3-asym/row@float16", None, CLIP[INT3], rotate_keys=True, rotate_values=True),
}
with_program = pytest.mark.skipif(
    (library := load_library()) is None or not can_run(library), reason="no compiled library on this machine"
)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    """Return a trained network, whose answers differ from each other."""
    return copy.deepcopy(trained_llama(sentences(400)))


def wide() -> PreTrainedModel:
    """Return a network with heads of 32 and 64, whose 4-bit codes fill complete registers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def by_transformers(network: PreTrainedModel, prompt: list[int], kv: KVCacheFormat, count: int = 16) -> list[int]:
    network = copy.deepcopy(network)
    network.generation_config.eos_token_id = None
    with torch.no_grad():
        output = network.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0,
            past_key_values=kv.cache(network.config),
        )  # fmt: skip
    return list(output[0, len(prompt) :].tolist())


def engine_of(network: PreTrainedModel, kv_cache_dtype: str | None, **more: Any) -> Engine:
    return Engine(Model(copy.deepcopy(network)), **{**SMALL, "kv_cache_dtype": kv_cache_dtype, **more})


def same(actual: list[list[int]], reference: list[list[int]]) -> bool:
    """Compare up to a near tie: all answers begin alike, and all but one end alike."""
    return sum(a != b for a, b in zip(actual, reference, strict=True)) <= 1 and all(
        a[:3] == b[:3] for a, b in zip(actual, reference, strict=True)
    )


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
def test_tokens_match_a_cache_in_the_same_format(llama: PreTrainedModel, kv_cache_dtype: str, compiled: bool) -> None:
    engine = engine_of(llama, kv_cache_dtype, compiled=compiled)
    expected = [by_transformers(llama, prompt, SAME[kv_cache_dtype]) for prompt in prompts(4)]
    assert same(answers(engine, prompts(4)), expected)
    if kv_cache_dtype in (INT4, INT3) and compiled:  # and differ from an unquantized cache
        caches = (SAME[kv_cache_dtype], KVCacheFormat())
        packed_ones, plain_ones = ([by_transformers(llama, prompt, kv) for prompt in prompts(24)] for kv in caches)
        assert packed_ones != plain_ones


@with_program
@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
def test_the_program_matches_the_module(kv_cache_dtype: str) -> None:
    network = wide()
    engine, plain = engine_of(network, kv_cache_dtype), engine_of(network, kv_cache_dtype, compiled=False)
    assert engine.runner.backend == f"compiled-cpu, {kv_cache_dtype} KV cache" and plain.runner.backend.startswith(
        "eager"
    )
    assert answers(engine, prompts()) == answers(plain, prompts())


@with_program
def test_narrow_heads_have_no_program_in_four_bits(llama: PreTrainedModel) -> None:
    assert engine_of(llama, INT4).runner.backend.startswith("eager")
    assert engine_of(llama, INT8).runner.backend.startswith("compiled-cpu")


@with_program
@pytest.mark.parametrize("width", [24, 32, 64, 128])
@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
@pytest.mark.parametrize("window", [None, 30])
def test_compiled_attention_over_rows(kv_cache_dtype: str, width: int, window: int | None) -> None:
    torch.manual_seed(3)
    rows = KVQuantFormat(kv_cache_dtype, width)
    lengths, counts, size = [290, 5, 70], [100, 5, 1], 8
    pages = [rows.quantize(torch.randn(60, size, 2, width)) for _ in range(2)]
    tables = torch.stack([torch.randperm(60)[:37] for _ in lengths]).int()
    starts = torch.tensor([0, 100, 105, 106], dtype=torch.int32)
    batch = AttentionMetadata(starts, torch.tensor(lengths, dtype=torch.int32), tables, starts.long(), 290, counts)
    queries = torch.randn(106, 6, width)
    assert paged.attention_backend(queries, pages[0], rows) == CPU
    result = paged_attention(queries, *pages, batch, 0.2, window, rows)
    assert torch.allclose(result, paged_attention_reference(queries, *pages, batch, 0.2, window, rows), atol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
def test_heads_that_keep_everything_match_plain_pages_in_the_same_format(kv_cache_dtype: str, compiled: bool) -> None:
    network = wide()
    expected = answers(engine_of(network, kv_cache_dtype, compiled=False), prompts())
    engine = engine_of(
        network, kv_cache_dtype, compiled=compiled, kv_profile=retention(1.0, 3, 1), enable_prefix_caching=False
    )
    assert answers(engine, prompts()) == expected


@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
def test_heads_that_keep_little(llama: PreTrainedModel, kv_cache_dtype: str) -> None:
    """The scorer sees quantized keys, and selects nearly the same tokens."""
    texts = [prompt * 3 for prompt in prompts(4, seed=5)]
    expected = answers(engine_of(llama, None, kv_profile=retention(0.4), enable_prefix_caching=False), texts)
    engine = engine_of(llama, kv_cache_dtype, kv_profile=retention(0.4))
    actual = answers_without_a_check(engine, texts)
    same_start = sum(a[:4] == b[:4] for a, b in zip(actual, expected, strict=True))
    assert same_start >= (2 if kv_cache_dtype in (INT4, INT3) else 3)
    assert isinstance(engine.scheduler.cache_manager, PerHeadCacheManager)
    engine.scheduler.cache_manager.drop_sessions()
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


def answers_without_a_check(engine: Engine, texts: list[list[int]]) -> list[list[int]]:
    requests = [engine.submit(text, GREEDY)[0] for text in texts]
    while engine.busy:
        engine.step()
    return [request.output for request in requests]


@pytest.mark.parametrize("offload", [None, OffloadConfig(num_slots=24, keep_steps=3, refresh_interval=2)], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
def test_selecting_all_pages_matches_plain_pages_in_the_same_format(
    kv_cache_dtype: str, offload: OffloadConfig | None
) -> None:
    network, everything = wide(), SparseAttentionConfig(page_size=4, token_budget=96, sink_pages=1, recent_pages=1)
    expected = answers(engine_of(network, kv_cache_dtype), prompts(3))
    assert (
        answers(engine_of(network, kv_cache_dtype, page_selection=everything, kv_offload=offload), prompts(3))
        == expected
    )


@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
def test_a_text_that_fits_a_bounded_cache_matches_plain_pages(kv_cache_dtype: str) -> None:
    network = wide()
    expected = answers(engine_of(network, kv_cache_dtype, compiled=False), prompts())
    engine = engine_of(
        network,
        kv_cache_dtype,
        kv_token_cap=BoundedCacheConfig(100, 40, InfiniPot(prompt=(5, 6, 7))),
        max_model_len=None,
        enable_prefix_caching=False,
    )
    assert answers(engine, prompts()) == expected


@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
def test_a_bounded_cache_is_compressed_like_an_unquantized_one(kv_cache_dtype: str) -> None:
    """The same tokens stay, and their keys are rotated to their new positions before they are quantized again."""
    torch.manual_seed(5)
    model = Model(wide())
    compressor = InfiniPotCompressor(model, InfiniPot(prompt=(5, 6, 7)))
    keys, values = torch.randn(2, 3, 40, 2, 64).unbind(0)  # [layers, tokens, kv_heads, head_dim]
    attention = {layer: torch.rand(2, 40) for layer in range(3)}
    rows = torch.randperm(48)[:40]
    caches = []
    for dtype in (None, kv_cache_dtype):
        cache = PagedCache.empty(model.anatomy, 12, 4, torch.float32, torch.device("cpu"), dtype)
        pages = BoundedCachePages(cache, 12, torch.float32)
        for layer, kv_quant in cache.kv_quant.items():
            _, new_keys, new_values = quantize_qkv(kv_quant, keys[layer], keys[layer], values[layer])
            store_kv(new_keys, new_values, cache.keys[layer], cache.values[layer], rows)
        pages.record(rows, torch.arange(40))
        pages.keep(rows, attention, torch.arange(0, 40, 3), 14, compressor)
        caches.append(
            ([pages.keys(layer, rows[:14]) for layer in range(3)], pages.token_indices.flatten(0, 1)[rows[:14]])
        )
    (plain, plain_numbers), (quantized, numbers) = caches
    assert torch.equal(numbers, plain_numbers)
    for a, b in zip(quantized, plain, strict=True):
        assert float((a - b).norm() / b.norm()) < {INT8: 0.012, FP8: 0.05, INT4: 0.16, INT3: 0.35}[kv_cache_dtype]


def test_more_tokens_fit(llama: PreTrainedModel) -> None:
    anatomy = Model(wide()).anatomy
    nbytes = {dtype: block_bytes(anatomy, 4, torch.float32, dtype) for dtype in (None, *KV_QUANT_DTYPES)}
    assert nbytes[None] == 3 * 2 * 4 * 2 * 64 * 4
    assert nbytes[INT8] == nbytes[FP8] == nbytes[None] * 68 // 256 and nbytes[INT4] == nbytes[None] * 36 // 256
    assert nbytes[INT3] == nbytes[None] * 28 // 256
    memory = {"kv_cache_bytes": nbytes[None] * 10, "max_model_len": 128}
    assert engine_of(wide(), None, **memory).pool.num_blocks == 10
    assert (
        engine_of(wide(), INT8, **memory).pool.num_blocks == 37
        and engine_of(wide(), INT4, **memory).pool.num_blocks == 71
    )


def test_the_artifacts_kv_dtype_is_the_default(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(wide())
    assert resolve_kv_cache_dtype(model, None) is None and resolve_kv_cache_dtype(model, "model") is None
    for name, expected in (
        ("int8", INT8),
        ("fp8-e4m3/row", FP8),
        ("int4-asym/128@float16", INT4),
        ("int4-asym/64", INT4),
        ("int3-asym/128@float16", INT3),
    ):
        model.kv = KVCacheFormat(name)
        assert (
            resolve_kv_cache_dtype(model, None) == expected
            and resolve_kv_cache_dtype(model, "model") is None
            and resolve_kv_cache_dtype(model, INT8) == INT8
        )
    for other in (
        KVCacheFormat("int4-asym/32"),
        KVCacheFormat("int8", "int4-asym"),
        KVCacheFormat("mxfp4"),
        KVCacheFormat("int8", clip=0.9),
    ):
        model.kv = other
        with caplog.at_level(logging.WARNING):
            assert resolve_kv_cache_dtype(model, None) is None
        assert "has no paged kernel" in caplog.text
        caplog.clear()


def test_unsupported_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="'int2'; there is model, int8, fp8, int4, int3"):
        engine_of(BUILDS["llama"](), "int2")
    with pytest.raises(ModelError, match="over several devices yet"):
        engine_of(BUILDS["llama"](), INT8, tensor_parallel_size=2)
    arguments = ["serve", "smollm2-135m", "--kv-cache-dtype", "int2"]
    with pytest.raises(SmeltError, match="'int2' is unknown; choose one of model, int8, fp8, int4, int3"):
        call(program(arguments), arguments)


def test_prefixes_are_shared(llama: PreTrainedModel) -> None:
    engine = engine_of(llama, INT8)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    text = (prompts(1, seed=2)[0] * 3)[:70]
    first, second = (answers(engine, [text], params)[0] for _ in range(2))
    assert first == second and engine.state()["cached_tokens"] > 0
