"""Attention for Hopper GPUs. Without a GPU: what surrounds the kernels, and that they compile if NVRTC is installed.
With one: every kernel against the reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.kernels.triton_device import DEVICE, distance  # isort: skip  (before anything imports Triton)

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.gpu import hopper_attention, nvrtc
from smelt.kernels.gpu.arch import num_sms
from smelt.kernels.gpu.hopper_attention import LONG, SHORT, FewTiles, PrefillTiles
from smelt.kernels.gpu.paged import DecodeMetadata, QueryTiles
from smelt.kernels.gpu.prefill import PageList, PrefillAttention, query_tiles
from smelt.kernels.gpu.rope import RotaryParams
from smelt.kernels.gpu.rows import dequantize_pages
from smelt.kernels.kv_quant import FP8, INT3, INT4, KV_QUANT_DTYPES, KVQuantFormat
from smelt.kernels.paged import paged_attention_reference
from smelt.kernels.rope import apply_rope
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.kernels.ptxas import problems

BF16, FP16, NAN = torch.bfloat16, torch.float16, float("nan")
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def test_query_tiles_are_those_of_the_host() -> None:
    lens, tokens = [5, 64, 1, 0, 200], 32
    bounds = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
    expected = QueryTiles.from_query_lens(lens, torch.device("cpu"), (tokens, 0, 0, 0))
    count = len(expected.request_ids)
    requests, first = query_tiles(bounds, tokens, count + 3)
    assert torch.equal(requests[:count], expected.request_ids) and torch.equal(first[:count], expected.first_tokens)
    assert (first[count:] >= bounds.diff()[requests[count:]]).all(), "tiles behind the last one have no tokens"


@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_dequantized_pages(kv_cache_dtype: str, head_dim: int) -> None:
    torch.manual_seed(0)
    kv_quant = KVQuantFormat.for_head_dim(kv_cache_dtype, head_dim)
    pages = [kv_quant.quantize(torch.randn(7, 8, 3, head_dim)).to(DEVICE) for _ in range(2)]
    blocks = torch.tensor([6, 0, 3], dtype=torch.int32, device=DEVICE)
    for pair in zip(dequantize_pages(*pages, blocks, kv_quant, torch.float32), pages, strict=True):
        assert torch.equal(pair[0], kv_quant.dequantize(pair[1][blocks.long()]))


def test_all_kernels_compile(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if not nvrtc.is_available():
        pytest.skip("NVRTC is not installed")
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path))
    for dtype, head_dim, pack, tiles in [(BF16, 128, 4, LONG), (FP16, 64, 1, LONG), (BF16, 128, 16, SHORT)]:
        source = hopper_attention.prefill_source(dtype, head_dim, pack, 16, tiles)
        assert nvrtc.compile_to_cubin(source, "hopper_prefill", "sm_90a")
        assert tiles.shared_bytes(head_dim) <= 227 * 1024
    for name, head_dim, kv_heads in itertools.product(KV_QUANT_DTYPES, (64, 128), (2, 8, 32)):
        kv_quant = KVQuantFormat.for_head_dim(name, head_dim)
        if head_dim not in hopper_attention.decode_head_dims(kv_quant):
            continue
        source = hopper_attention.decode_source(kv_quant, BF16, 4, kv_heads, 16)
        assert nvrtc.compile_to_cubin(source, "hopper_decode", "sm_90a")
    for tiles_few, head_dim, norm in itertools.product((FewTiles(4, 8), FewTiles(1, 1)), (64, 128), (True, False)):
        source = hopper_attention.decode_few_source(tiles_few, FP16, head_dim, 4, 16, norm)
        assert nvrtc.compile_to_cubin(source, "hopper_decode_few", "sm_90a")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_kernel_spills_registers_or_serializes_products(head_dim: int) -> None:
    if not nvrtc.is_available():
        pytest.skip("NVRTC is not installed")
    sources = {
        f"prefill, {tiles}": hopper_attention.prefill_source(BF16, head_dim, 4, 16, tiles) for tiles in (LONG, SHORT)
    }
    for name in KV_QUANT_DTYPES:
        kv_quant = KVQuantFormat.for_head_dim(name, head_dim)
        sources[f"decode, {name}"] = hopper_attention.decode_source(kv_quant, BF16, 4, 8, 16)
    sources["decode of few"] = hopper_attention.decode_few_source(FewTiles(4, 8), BF16, head_dim, 4, 16, True)
    for kernel, source in sources.items():
        assert not problems(nvrtc.compiler_report(source, "kernel", "sm_90a")), kernel


def random_batch(
    query_lens: Sequence[int], context: Sequence[int], kv_heads: int, head_dim: int, block_size: int,
    dtype: torch.dtype, heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata]:  # fmt: skip
    """Return queries, pages in any order, and metadata. Whatever no request has is NaN."""
    seq_lens = [new + old for new, old in zip(query_lens, context, strict=True)]
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    order = torch.randperm(sum(counts) + 5, device="cuda", dtype=torch.int32)
    pages = torch.full((2, len(order), block_size, kv_heads, head_dim), NAN, device="cuda", dtype=dtype)
    tables = torch.zeros(len(counts), max(counts) + 3, device="cuda", dtype=torch.int32)
    for request, (seq_len, blocks) in enumerate(zip(seq_lens, order.split([*counts, 5])[:-1], strict=True)):
        tables[request, : len(blocks)] = blocks
        rows = torch.arange(seq_len, device="cuda")
        block = blocks[rows // block_size].long()
        pages[:, block, rows % block_size] = torch.randn(2, seq_len, kv_heads, head_dim, device="cuda").to(dtype)
    bounds = torch.tensor([0, *itertools.accumulate(query_lens)], device="cuda", dtype=torch.int32)
    metadata = AttentionMetadata(
        bounds, torch.tensor(seq_lens, device="cuda", dtype=torch.int32), tables, bounds.long(), max(seq_lens),
        list(query_lens),
    )  # fmt: skip
    queries = torch.randn(sum(query_lens), heads, head_dim, device="cuda", dtype=dtype)
    return queries, pages[0], pages[1], metadata


PREFILLS = [  # query_lens, context, heads, KV heads, head_dim, block_size, window, dtype
    ([5], [0], 32, 8, 128, 16, None, BF16),
    ([300, 1, 77], [0, 100, 513], 32, 8, 128, 16, None, BF16),
    ([130, 260], [64, 0], 32, 8, 64, 16, None, FP16),
    ([200, 500], [300, 0], 28, 4, 128, 32, None, BF16),
    ([200, 500], [300, 0], 8, 8, 128, 128, None, BF16),
    ([200, 500], [1300, 0], 16, 8, 128, 256, None, BF16),
    ([700, 33], [900, 4], 32, 8, 128, 16, 256, BF16),
    ([1000], [0], 32, 8, 64, 8, 100, BF16),
    ([257], [4000], 32, 2, 128, 16, None, BF16),
    ([512, 1, 37, 300], [0, 575, 0, 12], 9, 3, 64, 16, None, BF16),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tiles", [LONG, SHORT, PrefillTiles(1, 128, 1), PrefillTiles(2, 64, 3)])
@pytest.mark.parametrize("case", PREFILLS)
def test_prefill_equals_the_reference(case: Any, tiles: PrefillTiles) -> None:
    torch.manual_seed(0)
    query_lens, context, heads, kv_heads, head_dim, block_size, window, dtype = case
    batch = random_batch(query_lens, context, kv_heads, head_dim, block_size, dtype, heads)
    queries, keys, values, metadata = batch
    assert hopper_attention.supports_prefill(queries, keys)
    count = sum(-(-length // tiles.tokens(heads, kv_heads)) for length in query_lens) + 2
    where = query_tiles(metadata.cu_seqlens_q, tiles.tokens(heads, kv_heads), count)
    actual = hopper_attention.prefill(queries, keys, values, metadata, *where, head_dim**-0.5, window, tiles)
    reference = paged_attention_reference(
        queries.float(), keys.nan_to_num().float(), values.nan_to_num().float(), metadata, head_dim**-0.5, window
    )
    assert distance(actual, reference) < 4e-3
    again = hopper_attention.prefill(queries, keys, values, metadata, *where, head_dim**-0.5, window, tiles)
    assert torch.equal(actual, again)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
def test_prefill_dequantizes_pages_first(kv_cache_dtype: str) -> None:
    torch.manual_seed(1)
    lens, context, block_size = [300, 140], [500, 0], 16
    queries, keys, values, metadata = random_batch(lens, context, 8, 128, block_size, BF16, 32)
    kv_quant = KVQuantFormat.for_head_dim(kv_cache_dtype, 128)
    pages = [kv_quant.quantize(x.nan_to_num().float()) for x in (keys, values)]
    counts = [-(-length // block_size) for length in metadata.seq_lens.tolist()]
    blocks = torch.cat([metadata.block_tables[request, :count] for request, count in enumerate(counts)])
    copied = torch.stack([torch.arange(max(counts)) + first for first in (0, counts[0])]).int().cuda()
    tiles = QueryTiles.from_query_lens(lens, queries.device, (64, 64, 4, 2))
    count_tiles = lambda tokens: sum(-(-length // tokens) for length in lens)  # noqa: E731
    prefill = PrefillAttention(metadata, tiles, count_tiles, LONG, PageList(blocks, copied))
    assert prefill._dequantizes(queries, pages[0], kv_quant)
    actual = prefill(queries, *pages, 128**-0.5, None, kv_quant)
    reference = paged_attention_reference(queries.float(), *pages, metadata, 128**-0.5, None, kv_quant)
    assert distance(actual, reference) < 5e-3
    direct = PrefillAttention(metadata, tiles, count_tiles, LONG)(queries, *pages, 128**-0.5, None, kv_quant)
    assert distance(direct, reference) < 1e-2


DECODES = [  # seq_lens, heads, KV heads, head_dim, block_size, window, splits, dtype
    ([1, 17, 500], 32, 8, 128, 16, None, 1, BF16),
    ([1, 0, 17, 500], 32, 8, 128, 16, None, 4, BF16),
    ([1000, 333], 32, 8, 64, 32, None, 3, BF16),
    ([700, 40], 32, 32, 128, 16, None, 2, BF16),
    ([700, 40], 8, 2, 128, 16, 100, 2, BF16),
    ([700, 40], 14, 2, 64, 16, None, None, FP16),
    ([3000, 40], 8, 1, 128, 16, None, None, BF16),
    ([1, 575, 0, 300], 9, 3, 64, 16, None, None, BF16),
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("kv_cache_dtype", KV_QUANT_DTYPES)
@pytest.mark.parametrize("case", DECODES)
def test_decode_equals_the_reference(case: Any, kv_cache_dtype: str) -> None:
    torch.manual_seed(2)
    seq_lens, heads, kv_heads, head_dim, block_size, window, splits, dtype = case
    ones, context = [1] * len(seq_lens), [max(length - 1, 0) for length in seq_lens]
    queries, keys, values, metadata = random_batch(ones, context, kv_heads, head_dim, block_size, dtype, heads)
    kv_quant = KVQuantFormat.for_head_dim(kv_cache_dtype, head_dim)
    if head_dim not in hopper_attention.decode_head_dims(kv_quant):
        assert not hopper_attention.supports_decode(kv_quant, queries.flatten(1), heads, kv_heads, block_size, 10**6)
        return
    unused = keys[..., 0].isnan()
    clean = [kv_quant.quantize(x.nan_to_num().float()) for x in (keys, values)]
    pages = [x.clone() for x in clean]
    for x in pages:
        x[unused] = 0x7F  # NaN in E4M3
    lens = torch.tensor(seq_lens, device="cuda")
    counters = torch.zeros(len(seq_lens) * kv_heads, device="cuda", dtype=torch.int32)
    slots = torch.arange(len(seq_lens), device="cuda")
    tokens = DecodeMetadata(slots, lens, metadata.block_tables, counters, max(seq_lens))
    actual = hopper_attention.decode(queries, *pages, kv_quant, tokens, head_dim**-0.5, window, splits)
    reference = paged_attention_reference(queries.float(), *clean, metadata, head_dim**-0.5, window, kv_quant)
    present = lens > 0
    assert not actual[~present].any() and not counters.any()
    assert distance(actual[present], reference[present]) < 4e-3
    again = hopper_attention.decode(queries, *pages, kv_quant, tokens, head_dim**-0.5, window, splits)
    assert torch.equal(actual, again)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("kv_cache_dtype", "head_dim"), [(None, 64), (FP8, 64), (INT4, 64), (INT3, 128)])
def test_an_engine_gives_the_tokens_of_the_other_kernels(
    kv_cache_dtype: str | None, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts in chunks, then 16 streams: with these kernels and without."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        head_dim=head_dim, vocab_size=512, max_position_embeddings=8192,
    )  # fmt: skip
    network = LlamaForCausalLM(config).to("cuda", BF16).eval()
    prompts = [torch.randint(512, (length,)).tolist() for length in range(100, 1700, 100)]
    options = {"max_model_len": 8192, "kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 16, "kv_cache_bytes": 10**9}
    called: list[str] = []

    def tokens() -> list[int]:
        engine = Engine(Model(network), **options)
        sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        requests = [engine.submit(prompt, sampling)[0] for prompt in prompts]
        while engine.busy:
            engine.step()
        return [token for request in requests for token in request.output[:2]]

    for name in ("prefill", "decode"):
        kernel = getattr(hopper_attention, name)
        monkeypatch.setattr(
            hopper_attention, name, lambda *a, kernel=kernel, name=name: called.append(name) or kernel(*a)
        )
    ours = tokens()
    assert set(called) == ({"prefill"} if kv_cache_dtype is None else {"prefill", "decode"})
    monkeypatch.setattr(hopper_attention, "supports_prefill", lambda *_: False)
    monkeypatch.setattr(hopper_attention, "supports_decode", lambda *_: False)
    called.clear()
    theirs = tokens()
    assert not called
    # Random weights: a few of the largest logits are closer than rounding.
    assert sum(one == other for one, other in zip(ours, theirs, strict=True)) >= 24


FEW = [  # seq_lens, heads, KV heads, head_dim, block_size, window, norms, dtype
    ([400], 32, 8, 128, 16, None, False, BF16),
    ([1], 32, 8, 64, 16, None, True, FP16),
    ([1000, 33, 0, 64, 65], 12, 2, 128, 8, None, True, BF16),
    ([700, 40, 41], 8, 8, 64, 32, 40, False, BF16),
    ([17] * 16, 14, 2, 64, 16, None, False, FP16),
    ([575, 1, 0, 64], 9, 3, 64, 16, None, False, BF16),
    ([9, 17, 33, 42, 57], 9, 3, 64, 16, None, False, BF16),  # splits with the new token alone
]


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tiles", [None, (1, 1), (1, 8), (2, 4), (4, 2)])
@pytest.mark.parametrize("case", FEW)
def test_decode_of_few_requests_equals_the_reference(case: Any, tiles: tuple[int, int] | None) -> None:
    torch.manual_seed(0)
    seq_lens, heads, kv_heads, head_dim, block_size, window, normed, dtype = case
    if tiles is not None and heads // kv_heads % tiles[0]:
        pytest.skip("a block has query heads of one KV head")
    contexts = [max(seq_len - 1, 0) for seq_len in seq_lens]
    new = [min(seq_len, 1) for seq_len in seq_lens]
    _, keys, values, metadata = random_batch(new, contexts, kv_heads, head_dim, block_size, dtype, heads)
    qkv = torch.randn(len(seq_lens), (heads + 2 * kv_heads) * head_dim, device="cuda").to(dtype)
    cos, sin = (torch.randn(1024, head_dim, device="cuda") for _ in range(2))
    norms = tuple(torch.rand(head_dim, device="cuda").to(dtype) for _ in range(2)) if normed else None
    slots, lengths = torch.arange(len(seq_lens), device="cuda"), torch.tensor(seq_lens, device="cuda")
    counters = torch.zeros(0, dtype=torch.int32, device="cuda")
    expected_keys, expected_values, queries = keys.clone(), values.clone(), []
    for request, length in enumerate(seq_lens):
        if not length:
            continue
        parts = qkv[request].float().view(-1, head_dim).split([heads, kv_heads, kv_heads])
        rotated = [
            apply_rope(normalize(part, norm), cos[length - 1], sin[length - 1])
            for part, norm in zip(parts[:2], norms or (None, None), strict=True)
        ]
        block = metadata.block_tables[request, (length - 1) // block_size]
        expected_keys[block, (length - 1) % block_size] = rotated[1].to(dtype)
        expected_values[block, (length - 1) % block_size] = parts[2].to(dtype)
        queries.append(rotated[0].to(dtype).float())
    decode = DecodeMetadata(slots, lengths, metadata.block_tables, counters, max(seq_lens))
    fill_shared_memory()
    actual = hopper_attention.decode_few(
        qkv, keys, values, decode, RotaryParams(cos, sin, norms, 1e-5), head_dim**-0.5, window,
        None if tiles is None else FewTiles(*tiles),
    )  # fmt: skip
    for pages, expected in ((keys, expected_keys), (values, expected_values)):
        assert torch.equal(pages.isnan(), expected.isnan()), "only the new tokens are stored"
        assert distance(pages.nan_to_num().float(), expected.nan_to_num().float()) < 1e-3
    reference = paged_attention_reference(
        torch.stack(queries), expected_keys.nan_to_num().float(), expected_values.nan_to_num().float(), metadata,
        head_dim**-0.5, window,
    )  # fmt: skip
    assert distance(actual[lengths > 0].float(), reference.flatten(1)) < 5e-3
    assert not actual[lengths == 0].any()


FILL = """
extern "C" __global__ void fill() {
    extern __shared__ unsigned memory[];
    for (int i = threadIdx.x; i < 200 * 256; i += 1024) ((volatile unsigned*)memory)[i] = 0x7FFF7FFF;
}
"""


def fill_shared_memory() -> None:
    """Leave NaN in the shared memory of all multiprocessors, as a kernel that read unused pages may."""
    device = torch.device("cuda", torch.cuda.current_device())
    kernel = nvrtc.CudaKernel.load(nvrtc.compile_to_cubin(FILL, "fill", "sm_90a"), "fill", device, 200 * 1024)
    kernel.launch((4 * num_sms(device), 1, 1), 1024, (), cluster=None, dependent=False)


def normalize(heads: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
    return heads if norm is None else torch.nn.functional.rms_norm(heads, heads.shape[-1:], norm.float(), 1e-5)
