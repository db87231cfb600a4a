"""The GPU runner: transformers' tokens, with the next step launched before this one is read.

On a CUDA device with CUDA graphs, elsewhere under Triton's interpreter.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.kernels.triton_device import DEVICE, HALF, distance  # isort: skip  (before anything imports Triton)

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.gpu import launch
from smelt.kernels.gpu.activations import RowQuant
from smelt.kernels.gpu.fused_ops import (
    act_and_mul,
    act_and_mul_quantize,
    add_rms_norm,
    add_rms_norm_quantize,
    argmax_tokens,
    embed,
)
from smelt.kernels.gpu.paged import DecodeMetadata, num_splits, paged_decode, paged_prefill
from smelt.kernels.gpu.rope import RotaryParams, rope_and_store_kv
from smelt.kernels.gpu.vector import fused_gemv
from smelt.kernels.kv_quant import (
    INT3,
    INT4,
    INT8,
    KV_QUANT_DTYPES,
    QPARAM_BYTES,
    KVQuantFormat,
    quantize_qkv,
    row_layout,
)
from smelt.kernels.paged import paged_attention_reference
from smelt.models.model import Model
from smelt.serve.engine import factory
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.factory import paged_gpu_runner, paged_runner
from smelt.serve.engine.sampling_params import SamplingParams
from tests.serve.test_engine import GREEDY, SMALL, answers, expected, prompts
from tests.serve.test_prompt_logprobs import check as check_prompt_logprobs
from tests.serve.test_prompt_logprobs import reference as prompt_reference
from tests.serve.test_prompt_logprobs import run as prompt_logprobs
from tests.tiny import BUILDS


@pytest.fixture(autouse=True)
def _gpu_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the GPU runner also without a CUDA device."""

    def select_runner(resolved: Any, num_blocks: int) -> Any:
        return (paged_gpu_runner if resolved.config.compiled else paged_runner)(resolved, num_blocks)

    monkeypatch.setattr(factory, "paged_runner", select_runner)


def engine_of(name: str, **more: Any) -> tuple[Engine, Any]:
    network = BUILDS[name]().to(DEVICE)
    return Engine(Model(copy.deepcopy(network)), **{**SMALL, **more}), network.cpu()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_tokens_match_transformers(name: str) -> None:
    engine, network = engine_of(name, prefill_chunk_size=9)
    texts, params = prompts(4), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    assert engine.runner.max_inflight_steps == 1
    assert answers(engine, texts, params) == [expected(network, text, 6) for text in texts]


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are captured on a CUDA device")
def test_after_warmup_nothing_is_captured_or_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    engine, network = engine_of("llama", max_num_seqs=12)
    engine.warmup()
    captured = set(engine.runner._captured)  # type: ignore[attr-defined]
    assert {size for size, _ in captured} == {1, 2, 4, 8, 16} and engine.state()["steps"] == 0
    texts, compiled = prompts(12), []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **options: compiled.append(options["repr"]))
    assert answers(engine, texts) == [expected(network, text) for text in texts]
    assert set(engine.runner._captured) == captured and not compiled  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_short_prompts_run_as_one_padded_step(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One and many prompts, greedily and with log-probabilities; together they fill the captured size."""
    engine, network = engine_of("llama", enable_prefix_caching=False)
    texts = prompts(count)
    texts[-1] = (texts[-1] * 16)[: 16 - sum(map(len, texts[:-1])) % 16 or 16]
    steps = []
    for name in ("_run_prefill", "_run_mixed"):
        run = getattr(engine.runner, name)
        monkeypatch.setattr(engine.runner, name, lambda *args, run=run, name=name: steps.append(name) or run(*args))
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    assert answers(engine, texts, params) == [expected(network, text, 4) for text in texts]
    seeded = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2)
    assert answers(engine, texts, seeded) == [expected(network, text, 4) for text in texts]
    assert steps == ["_run_prefill"] * 2, steps


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0, "logprobs": 2}, {"temperature": 1.5}])
def test_many_decode_tokens_have_a_graph_of_their_own(
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that arrive while more requests decode than one prefill graph holds, and more prompts than it holds."""
    monkeypatch.setattr("smelt.serve.engine.gpu_runner.MAX_PREFILL_CHUNKS", 2)
    engine = engine_of("llama", enable_prefix_caching=False)[0]
    steps: list[tuple[str, int]] = []
    for name in ("_run_decode", "_run_prefill"):
        run = getattr(engine.runner, name)
        monkeypatch.setattr(
            engine.runner, name, lambda part, run=run, name=name: steps.append((name, len(part))) or run(part)
        )
    monkeypatch.setattr(engine.runner, "_run_mixed", lambda *_: pytest.fail("this step has graphs"))
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True, **sampling)
    texts = prompts(6)
    requests = []
    for first, last in ((0, 3), (3, 6)):
        requests += [engine.submit(text, params)[0] for text in texts[first:last]]
        for _ in range(2):
            engine.step()
    while engine.busy:
        engine.step()
    eager = engine_of("llama", compiled=False)[0]
    assert [request.output for request in requests] == [answers(eager, [text], params)[0] for text in texts]
    assert steps[:6] == [
        ("_run_prefill", 2), ("_run_prefill", 1), ("_run_decode", 3),
        ("_run_decode", 3), ("_run_prefill", 2), ("_run_prefill", 1),
    ]  # fmt: skip


def test_preemption_and_the_prefix_cache() -> None:
    engine, network = engine_of("llama", kv_cache_bytes=18 * 3 * 2 * 4 * 2 * 8 * 4)
    texts, params = prompts(3), SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    requests = [engine.submit(text, params)[0] for text in texts]
    while engine.busy:
        engine.step()
    assert sum(request.preemptions for request in requests) > 0
    assert [request.output for request in requests] == [expected(network, text, 10) for text in texts]


def test_requests_that_need_previous_tokens_wait_for_them() -> None:
    plain = engine_of("llama")[0]
    params = SamplingParams(max_tokens=8, temperature=0, repetition_penalty=5.0, ignore_eos=True)
    result = answers(plain, prompts(2), params)
    assert all(len(set(tokens)) == 8 for tokens in result)  # no token repeats
    sampling = SamplingParams(max_tokens=6, temperature=1.5, seed=3, ignore_eos=True)
    alone = answers(engine_of("llama")[0], prompts(1), sampling)
    engine = engine_of("llama")[0]
    others = [engine.submit(text, GREEDY)[0] for text in prompts(3)[1:]]
    seeded = engine.submit(prompts(1)[0], sampling)[0]
    while engine.busy:
        engine.step()
    assert seeded.output == alone[0] and all(len(request.output) == 16 for request in others)


@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
def test_greedy_tokens_with_a_quantized_cache_match_the_module(kv_cache_dtype: str) -> None:
    engine, network = engine_of("llama", kv_cache_dtype=kv_cache_dtype)
    plain = Engine(Model(network), **SMALL, kv_cache_dtype=kv_cache_dtype, compiled=False)
    texts = [tokens[-5:] for tokens in prompts(3)]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    assert engine.runner.backend.startswith("fused-gpu") and plain.runner.backend.startswith("eager")
    actual, reference = answers(engine, texts, params), answers(plain, texts, params)
    assert [tokens[:2] for tokens in actual] == [tokens[:2] for tokens in reference]
    assert sum(a == b for a, b in zip(actual, reference, strict=True)) >= 2  # up to a near tie


def random_pages(blocks: int, size: int, kv_heads: int, width: int, rows: KVQuantFormat | None) -> list[torch.Tensor]:
    pages = [torch.randn(blocks, size, kv_heads, width) for _ in range(2)]
    return [(page if rows is None else rows.quantize(page)).to(DEVICE) for page in pages]


def pages_close(actual: torch.Tensor, reference: torch.Tensor, rows: KVQuantFormat | None) -> bool:
    """Compare pages. Bytes may differ in a few codes (rounding at a half), scales in the last bit."""
    if rows is None:
        return torch.allclose(actual, reference, atol=1e-5)
    near = torch.allclose(
        rows.dequantize(actual), rows.dequantize(reference), rtol=0.13,
        atol={INT4: 0.6, INT3: 1.2}.get(rows.name, 0.05),
    )  # fmt: skip
    if rows.name not in (INT4, INT3):
        scales = [page[..., -QPARAM_BYTES:].contiguous().view(torch.float32) for page in (actual, reference)]
        near &= torch.allclose(*scales, rtol=1e-6)
        actual, reference = actual[..., :-QPARAM_BYTES], reference[..., :-QPARAM_BYTES]
    return near and int((actual != reference).sum()) <= 2


PLAIN = [(splits, window, normed, None, 24) for splits in (1, 4) for window in (None, 70) for normed in (False, True)]
FEW_BITS = [
    each
    for kv_cache_dtype in KV_QUANT_DTYPES
    for each in ((1, None, True, kv_cache_dtype, 24), (4, 70, False, kv_cache_dtype, 32))
]


@pytest.mark.parametrize(("splits", "window", "normed", "kv_cache_dtype", "width"), [*PLAIN, *FEW_BITS])
def test_decode_attention(
    splits: int, window: int | None, normed: bool, kv_cache_dtype: str | None, width: int
) -> None:
    """New keys are rotated, written and attended to, as by rotating, writing and then running the reference."""
    torch.manual_seed(0)
    lengths, size, heads, kv_heads = [300, 1, 64, 0], 16, 9, 3
    rows = None if kv_cache_dtype is None else KVQuantFormat.for_head_dim(kv_cache_dtype, width)
    pages = random_pages(100, size, kv_heads, width, rows)
    tables = torch.randperm(100)[:80].view(4, 20).int().to(DEVICE)
    slots = torch.tensor([2, 0, 3, 1], device=DEVICE)
    last = torch.tensor([max(length - 1, 0) for length in lengths], device=DEVICE)
    slot_mapping = tables[slots, last // size].long() * size + last % size
    slot_mapping[3] = -1
    split_counter = torch.zeros(4 * kv_heads, dtype=torch.int32, device=DEVICE)
    tokens = DecodeMetadata(slots, torch.tensor(lengths, device=DEVICE), tables, split_counter, 300)
    norms = (torch.rand(width, device=DEVICE), torch.rand(width, device=DEVICE)) if normed else None
    rotation = RotaryParams(torch.randn(300, width, device=DEVICE), torch.randn(300, width, device=DEVICE), norms, 1e-6)
    qkv = torch.randn(4, (heads + 2 * kv_heads) * width, device=DEVICE)
    others = [page.clone() for page in pages]
    queries = rope_and_store_kv(qkv, last, slot_mapping, rotation, *others, kv_quant=rows)
    starts = torch.arange(4, dtype=torch.int32, device=DEVICE)
    batch = AttentionMetadata(starts, tokens.seq_lens[:3].int(), tables[slots[:3]], slot_mapping, 300, [1, 1, 1])
    actual = paged_decode(qkv, *pages, tokens, rotation, 0.2, window, splits=splits, kv_quant=rows)
    reference = paged_attention_reference(queries[:3], *pages, batch, 0.2, window, rows)
    assert torch.allclose(actual[:3], reference.flatten(1), atol=1e-4)
    assert bool((actual[3] == 0).all())  # a padding row
    assert all(pages_close(page, other, rows) for page, other in zip(pages, others, strict=True))
    assert not bool(split_counter.any())  # ready for the next call


@pytest.mark.parametrize("around", ["plain", "normed", "gated", "added"])
def test_matrix_vector_products(around: str) -> None:
    torch.manual_seed(4)
    x, matrix, bias, norm = torch.randn(1, 300), torch.randn(50, 300), torch.randn(50), torch.rand(300)
    on_device = [tensor.to(DEVICE) for tensor in (x, matrix, bias, norm)]
    normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm
    if around == "plain":
        actual, reference = fused_gemv(on_device[0], on_device[1], on_device[2]), x @ matrix.T + bias
    elif around == "normed":
        actual = fused_gemv(on_device[0], on_device[1], on_device[2], norm=on_device[3], epsilon=1e-5)
        reference = normal @ matrix.T + bias
    elif around == "gated":
        actual = fused_gemv(on_device[0], on_device[1], norm=on_device[3], epsilon=1e-5, gated=True, tiles=(4, 64, 4))
        gates, through = (normal @ matrix.T).chunk(2, dim=-1)
        reference = torch.nn.functional.silu(gates) * through
    else:
        hidden = torch.randn(1, 50)
        reference, on_gpu = hidden + x @ matrix.T, hidden.to(DEVICE)
        actual = fused_gemv(on_device[0], on_device[1], residual=on_gpu)
        assert actual is on_gpu
    assert torch.allclose(actual.cpu(), reference, rtol=1e-4, atol=1e-4)


def test_tokens_still_on_the_device_are_embedded() -> None:
    embeddings, last = torch.randn(10, 70, device=DEVICE), torch.tensor([3, 9, 5], device=DEVICE)
    known, slots = torch.tensor([4, -1, -1], device=DEVICE), torch.tensor([0, 2, 1], device=DEVICE)
    assert torch.equal(embed(known, slots, last, embeddings), embeddings[torch.tensor([4, 5, 9], device=DEVICE)])


@pytest.mark.parametrize(
    ("window", "kv_cache_dtype", "width"),
    [
        (None, None, 16),
        (20, None, 16),
        (150, None, 16),
        *[(20, kv_cache_dtype, 24) for kv_cache_dtype in KV_QUANT_DTYPES],
        (None, INT4, 16),
        (None, INT3, 16),
    ],
)
def test_prefill_attention(window: int | None, kv_cache_dtype: str | None, width: int) -> None:
    torch.manual_seed(1)
    lengths, counts, size = [330, 5, 70], [100, 5, 1], 8
    rows = None if kv_cache_dtype is None else KVQuantFormat.for_head_dim(kv_cache_dtype, width)
    pages = random_pages(60, size, 2, width, rows)
    tables = torch.stack([torch.randperm(60)[:42] for _ in lengths]).int().to(DEVICE)
    starts = torch.tensor([0, 100, 105, 106], dtype=torch.int32, device=DEVICE)
    batch = AttentionMetadata(
        starts, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), tables, starts.long(), 330, counts
    )
    queries = torch.randn(106, 4, width, device=DEVICE)
    result = paged_prefill(queries, *pages, batch, 0.25, window, kv_quant=rows)
    assert torch.allclose(result, paged_attention_reference(queries, *pages, batch, 0.25, window, rows), atol=1e-5)


@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
@pytest.mark.parametrize("width", [64, 128])
def test_quantized_rows_in_half_precision(kv_cache_dtype: str, width: int) -> None:
    """One token and many attend to codes that are dequantized several at a time."""
    torch.manual_seed(7)
    rows, size, length = KVQuantFormat.for_head_dim(kv_cache_dtype, width), 16, 200
    pages = random_pages(40, size, 2, width, rows)
    tables = torch.randperm(40, device=DEVICE)[:26].view(2, 13).int()
    lengths, ends = [length, length - 60], torch.tensor([length, length - 60], device=DEVICE)
    rotation = RotaryParams(torch.ones(length, width, device=DEVICE), torch.zeros(length, width, device=DEVICE))
    split_counter = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    tokens = DecodeMetadata(torch.arange(2, device=DEVICE), ends, tables, split_counter, length)
    qkv = torch.randn(2, 12 * width, device=DEVICE, dtype=HALF)
    queries = qkv.view(2, 12, width)[:, :8].float()
    bounds = torch.arange(3, dtype=torch.int32, device=DEVICE)
    batch = AttentionMetadata(bounds, ends.int(), tables, ends, length, [1, 1])
    for splits in (1, 4):
        actual = paged_decode(qkv, *pages, tokens, rotation, width**-0.5, splits=splits, kv_quant=rows)
        reference = paged_attention_reference(rows.rotate(queries), *pages, batch, width**-0.5, kv_quant=rows)
        assert distance(actual, reference.flatten(1)) < 0.01
    many_queries = torch.randn(sum(lengths), 8, width, device=DEVICE, dtype=HALF)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    batch = AttentionMetadata(starts, ends.int(), tables, starts.long(), length, lengths)
    actual = paged_prefill(many_queries, *pages, batch, width**-0.5, kv_quant=rows)
    assert (
        distance(actual, paged_attention_reference(many_queries.float(), *pages, batch, width**-0.5, kv_quant=rows))
        < 0.01
    )


@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
def test_small_weights_are_not_lost_in_half_precision(kv_cache_dtype: str) -> None:
    """One key takes nearly all of the attention; the contribution of the many others survives."""
    torch.manual_seed(6)
    rows, length = KVQuantFormat.for_head_dim(kv_cache_dtype, 16), 640
    keys, values = 0.1 * torch.randn(80, 8, 1, 16), 1e-3 + 1e-4 * torch.rand(80, 8, 1, 16)
    keys[3, 0], values[3, 0] = 1.0, 0.0
    pages = [rows.quantize(rows.rotate(keys)).to(DEVICE), rows.quantize(values).to(DEVICE)]
    bounds = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    tables = torch.arange(80, dtype=torch.int32, device=DEVICE)[None]
    batch = AttentionMetadata(
        bounds, torch.tensor([length], dtype=torch.int32, device=DEVICE), tables, bounds.long(), length, [1]
    )
    queries = rows.rotate(torch.full((1, 1, 16), 1.0)).half().to(DEVICE)
    actual = paged_prefill(queries, *pages, batch, 0.5, kv_quant=rows)
    reference = paged_attention_reference(queries.float(), *pages, batch, 0.5, kv_quant=rows)
    assert distance(actual, reference) < 0.02


def test_small_operations() -> None:
    torch.manual_seed(2)
    hidden, residual, weight = torch.randn(3, 40), torch.randn(3, 40), torch.randn(40)
    total = hidden + residual
    reference = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5) * weight
    on_gpu = hidden.to(DEVICE)
    assert torch.allclose(
        add_rms_norm(on_gpu, residual.to(DEVICE), weight.to(DEVICE), 1e-5).cpu(), reference, atol=1e-5
    )
    assert torch.allclose(on_gpu.cpu(), total)
    gate_up = torch.randn(3, 72)
    actual = act_and_mul(gate_up.to(DEVICE)).cpu()
    assert torch.allclose(actual, torch.nn.functional.silu(gate_up[:, :36]) * gate_up[:, 36:], atol=1e-5)


@pytest.mark.parametrize(
    "quant",
    [
        RowQuant(torch.int8, 127.0, "float32"),
        RowQuant(torch.int8, 127.5, "float16", clip_ratio=0.9),
        RowQuant(torch.int8, 127.0, "float32", torch.full((1,), 0.02, device=DEVICE)),
        RowQuant(torch.float8_e4m3fn, 448.0, "bfloat16"),
    ],
)
def test_fused_quantization_equals_a_kernel_of_its_own(quant: RowQuant) -> None:
    hidden, residual, gate_up = (torch.randn(5, width, device=DEVICE, dtype=HALF) for width in (200, 200, 400))
    hidden[1], residual[1], gate_up[1] = 0.0, 0.0, 0.0
    hidden[2, 3] = gate_up[2, 3] = float("nan")
    gate_up[3, 7] = 1e4
    weight = torch.rand(200, device=DEVICE, dtype=HALF)
    normed = add_rms_norm_quantize(hidden.clone(), residual, weight, 1e-5, quant)
    gated = act_and_mul_quantize(gate_up, quant)
    for fused, plain in (
        (normed, add_rms_norm(hidden.clone(), residual, weight, 1e-5)),
        (gated, act_and_mul(gate_up)),
    ):
        codes, scales = launch.quantize_rows(
            plain, quant.dtype, quant.amax_code, quant.scale_dtype, quant.static_scale, quant.clip_ratio
        )
        assert torch.equal(fused.codes.view(torch.int8), codes.view(torch.int8)) and fused.dtype == HALF
        torch.testing.assert_close(fused.scales, scales, rtol=0, atol=0, equal_nan=True)
        assert scales[2].isnan() and not scales[[0, 1, 3, 4]].isnan().any()


def test_argmax_returns_the_first_of_equal_tokens() -> None:
    torch.manual_seed(5)
    logits = torch.randn(3, 9000, device=DEVICE)
    logits[0, [17, 5000]], logits[1, [8999, 4095]], logits[2, 4096] = 9.0, 9.0, 9.0
    last, slots = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.tensor([3, 0, 2], device=DEVICE)
    assert argmax_tokens(logits, slots, last).tolist() == [17, 4095, 4096]
    assert last.tolist() == [4095, 0, 4096, 17]
    logits[1:] = torch.nan  # the padding of the splits must not win
    logits[1, 4100] = 0.0
    assert argmax_tokens(logits, slots, last).tolist() == [17, 4100, 0]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="a load for a CUDA device")
def test_many_requests_of_three_query_heads_per_kv_head() -> None:
    """The shape of SmolLM2-135M under the load of a trace: prompts of up to 512 tokens arrive while others decode."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=None,
    )  # fmt: skip
    network = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    options = {"max_model_len": 576, "max_num_seqs": 64, "kv_cache_bytes": 4 * 10**9}
    engine = Engine(Model(network), enable_prefix_caching=False, **options)
    engine.warmup([32] * 8)
    generator, lengths = torch.Generator().manual_seed(0), [1, 512, 37, 300, 512, 64, 200, 511]
    sampling = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    requests, steps = [], 0
    while len(requests) < 96 or engine.busy:
        if len(requests) < 96 and steps % 3 == 0:
            prompt = torch.randint(49152, (lengths[len(requests) % 8],), generator=generator).tolist()
            requests.append(engine.submit(prompt, sampling)[0])
        engine.step()
        steps += 1
    assert all(len(request.output) == 64 for request in requests)


@pytest.mark.parametrize(
    ("normed", "kv_cache_dtype", "width"),
    [
        (False, None, 12),
        (True, None, 12),
        *[(True, kv_cache_dtype, 12) for kv_cache_dtype in KV_QUANT_DTYPES],
        (False, INT8, 6),
        (False, INT4, 16),
        (False, INT3, 16),
    ],
)
@pytest.mark.parametrize("together", [1, 2, 8])
def test_rope_and_cache_writes(
    normed: bool, kv_cache_dtype: str | None, width: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smelt.kernels.gpu.rope.MANY_TOKENS", 1)
    monkeypatch.setattr("smelt.kernels.gpu.rope.HEADS_PER_PROGRAM", together)
    torch.manual_seed(3)
    heads, kv_heads, tokens = 4, 2, 5
    rows = None if kv_cache_dtype is None else KVQuantFormat.for_head_dim(kv_cache_dtype, width)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width)
    cosines, sines = torch.randn(9, width), torch.randn(9, width)
    positions, slot_mapping = torch.tensor([0, 8, 3, 3, 1]), torch.tensor([7, 0, 11, -1, 4])
    last, dtype = row_layout(rows, width, torch.float32)
    pages = [torch.zeros(3, 4, kv_heads, last, dtype=dtype, device=DEVICE) for _ in range(2)]
    weights = (torch.rand(width), torch.rand(width)) if normed else None
    per_head = qkv.unflatten(1, (-1, width)).clone()
    for first_head, count, weight in ((0, heads, 0), (heads, kv_heads, 1)):
        part = per_head[:, first_head : first_head + count]
        if weights is not None:
            part = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * weights[weight]
        half = torch.cat([-part[..., width // 2 :], part[..., : width // 2]], dim=-1)
        per_head[:, first_head : first_head + count] = (
            part * cosines[positions][:, None] + half * sines[positions][:, None]
        )
    on_gpu = qkv.to(DEVICE)
    on_device = None if weights is None else (weights[0].to(DEVICE), weights[1].to(DEVICE))
    rotation = RotaryParams(cosines.to(DEVICE), sines.to(DEVICE), on_device, 1e-6)
    queries = rope_and_store_kv(on_gpu, positions.to(DEVICE), slot_mapping.to(DEVICE), rotation, *pages, kv_quant=rows)
    asking, keys, values = quantize_qkv(rows, *per_head.split((heads, kv_heads, kv_heads), dim=1))
    assert torch.allclose(queries.cpu(), asking, atol=1e-5)
    real = slot_mapping >= 0
    for page, reference in ((pages[0], keys), (pages[1], values)):
        written = page.cpu().flatten(0, 1)
        assert pages_close(written[slot_mapping[real]], reference[real], rows)
        assert int((written.float().abs().sum((1, 2)) > 0).sum()) == 4  # the token without a slot is not written


def test_splits_fill_the_multiprocessors() -> None:
    assert num_splits(1, 8, 8192, 132) == 32
    assert num_splits(256, 8, 8192, 132) == 1
    assert num_splits(1, 8, 100, 132) == 1


def test_log_probabilities_of_prompts_match_transformers() -> None:
    network = BUILDS["llama"]()
    engine = Engine(Model(copy.deepcopy(network).to(DEVICE)), **SMALL, prefill_chunk_size=8)
    assert engine.backend.startswith("fused-gpu")
    texts = prompts(3)
    for prompt, found in zip(texts, prompt_logprobs(engine, texts, *prompts(2, seed=1)), strict=True):
        check_prompt_logprobs(found, prompt_reference(network, prompt), prompt)
