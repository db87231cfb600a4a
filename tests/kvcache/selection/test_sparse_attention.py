"""Attention over selected pages equals attention with the others masked; over all pages it equals plain attention."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.dispatch import use_backend
from smelt.kernels.paged import paged_attention, store_kv
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.kvcache.selection.host_store import HostPageStore
from smelt.kvcache.selection.page_cache import OffloadConfig
from smelt.kvcache.selection.page_store import DevicePageStore
from smelt.kvcache.selection.page_summary import ArkVale, PageSummary, PageSummaryTable, Quest
from smelt.kvcache.selection.sparse_attention import DecodeBatch, PrefillChunk, SparseBatch, SparsePageAttention

KV_HEADS, GROUP, WIDTH, PAGE, BLOCKS, SCALE = 2, 3, 8, 4, 40, 0.3
LENGTHS = [29, 32, 5, 50]  # before the new token
CPU = torch.device("cpu")


def build_attention(selection: SparseAttentionConfig, offload: OffloadConfig | None = None) -> SparsePageAttention:
    heads = {0: (KV_HEADS, WIDTH)}
    if offload is None:
        pages: DevicePageStore | HostPageStore = DevicePageStore(heads, BLOCKS, PAGE, torch.float32, CPU)
    else:
        pages = HostPageStore(heads, BLOCKS, PAGE, torch.float32, CPU, offload)
    return SparsePageAttention(selection, pages, PageSummaryTable(selection.summary, heads, BLOCKS, torch.float32, CPU))


class Texts:
    """Keys and values of several requests, in blocks in random order."""

    def __init__(self, lengths: list[int] = LENGTHS) -> None:
        self.lengths = lengths
        self.keys = [torch.randn(length + 1, KV_HEADS, WIDTH) for length in lengths]
        self.values = [torch.randn(length + 1, KV_HEADS, WIDTH) for length in lengths]
        order = iter(torch.randperm(BLOCKS).tolist())
        self.blocks = [torch.tensor([next(order) for _ in range(length // PAGE + 1)]) for length in lengths]

    def slot_mapping(self, request: int, start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop)
        return self.blocks[request][positions // PAGE] * PAGE + positions % PAGE

    def read(self, attention: SparsePageAttention, chunk: int) -> None:
        """Prefill all tokens but the new one in chunks, each of which sees everything before it."""
        for request, length in enumerate(self.lengths):
            queries, parts = torch.randn(length, KV_HEADS * GROUP, WIDTH), []
            for start in range(0, length, chunk):
                stop = min(start + chunk, length)
                rows, filled = slice(start, stop), self.blocks[request][start // PAGE : stop // PAGE]
                blocks = self.blocks[request][: -(-stop // PAGE)]
                prefills = [PrefillChunk(slice(0, stop - start), stop, blocks)]
                layout = SparseBatch(1, self.slot_mapping(request, start, stop), filled, prefills)
                keys, values = self.keys[request][rows], self.values[request][rows]
                parts.append(attention.attend(0, queries[rows], keys, values, layout, SCALE))
            reference = expected(queries, self.keys[request][:length], self.values[request][:length], None)
            torch.testing.assert_close(torch.cat(parts), reference, atol=1e-5, rtol=1e-5)

    def new(self) -> SparseBatch:
        """Add one token to each request."""
        tables = torch.zeros(len(self.lengths), max(len(blocks) for blocks in self.blocks), dtype=torch.int64)
        for row, blocks in enumerate(self.blocks):
            tables[row, : len(blocks)] = blocks
        lengths = torch.tensor(self.lengths)
        slots = torch.cat([self.slot_mapping(row, length, length + 1) for row, length in enumerate(self.lengths)])
        full = [self.blocks[row][-1:] for row, length in enumerate(self.lengths) if (length + 1) % PAGE == 0]
        filled = torch.cat([torch.empty(0, dtype=torch.int64), *full])
        decodes = DecodeBatch(
            torch.arange(len(lengths)), lengths + 1, tables, [str(row) for row in range(len(lengths))]
        )
        return SparseBatch(2, slots, filled, (), [decodes])

    def newest(self) -> tuple[Tensor, Tensor]:
        return torch.stack([keys[-1] for keys in self.keys]), torch.stack([values[-1] for values in self.values])


def expected(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """Compute attention for the last tokens of a text [tokens, heads, head_dim]; each KV head sees the mask [kv_heads,
    tokens].
    """
    new, length = len(queries), len(keys)
    mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
    if visible is not None:
        mask = mask & visible.repeat_interleave(GROUP, 0)[:, None]
    q, k, v = (tensor.transpose(0, 1)[None].double() for tensor in (queries, keys, values))
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)
    return output[0].transpose(0, 1).float()


def pages_by_hand(selection: SparseAttentionConfig, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which tokens each KV head sees, computed from the keys themselves. [kv_heads, tokens]"""
    num_pages = -(-len(keys) // PAGE)
    visible = torch.zeros(KV_HEADS, num_pages * PAGE, dtype=torch.bool)
    always = {
        page for page in range(num_pages) if page < selection.sink_pages or page >= num_pages - selection.recent_pages
    }
    for head in range(KV_HEADS):
        scores = {}
        for page in set(range(num_pages)) - always:
            high, low = selection.summary.box(keys[page * PAGE : (page + 1) * PAGE, head])
            group = queries[head * GROUP : (head + 1) * GROUP]
            scores[page] = float(torch.maximum(group * high, group * low).sum())
        best = sorted(scores, key=lambda page: -scores[page])
        count = int(selection.num_selected_pages(torch.tensor([len(keys)])))
        for page in {*always, *best[: max(count - len(always), 0)]}:
            visible[head, page * PAGE : (page + 1) * PAGE] = True
    return visible[:, : len(keys)]


@pytest.mark.parametrize(
    "offload", [None, OffloadConfig(num_slots=40), OffloadConfig(num_slots=40, keep_steps=0)], ids=str
)
@pytest.mark.parametrize("digest", [Quest(), ArkVale()], ids=str)
@pytest.mark.parametrize("kernel", ["reference", "fastest"])
def test_selected_pages_hide_the_others(offload: OffloadConfig | None, digest: PageSummary, kernel: str) -> None:
    selection = SparseAttentionConfig(digest, page_size=PAGE, token_budget=4 * PAGE, sink_pages=1, recent_pages=1)
    attention, texts = build_attention(selection, offload), Texts()
    with use_backend("reference") if kernel == "reference" else nullcontext():
        texts.read(attention, chunk=7)
        queries = torch.randn(len(LENGTHS), KV_HEADS * GROUP, WIDTH)
        actual = attention.attend(0, queries, *texts.newest(), texts.new(), SCALE)
    for row, keys in enumerate(texts.keys):
        visible = pages_by_hand(selection, queries[row], keys)
        assert LENGTHS[row] < 16 or not visible.all()
        reference = expected(queries[row : row + 1], keys, texts.values[row], visible)
        torch.testing.assert_close(actual[row : row + 1], reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("offload", [None, OffloadConfig(num_slots=40)], ids=str)
def test_a_budget_of_all_pages_is_plain_paged_attention(offload: OffloadConfig | None) -> None:
    """Bit for bit."""
    attention, texts = (
        build_attention(SparseAttentionConfig(page_size=PAGE, token_budget=BLOCKS * PAGE), offload),
        Texts(),
    )
    texts.read(attention, chunk=16)
    queries, layout = torch.randn(len(LENGTHS), KV_HEADS * GROUP, WIDTH), texts.new()
    result = attention.attend(0, queries, *texts.newest(), layout, SCALE)
    key_pages, value_pages = torch.zeros(2, BLOCKS, PAGE, KV_HEADS, WIDTH)
    for row, length in enumerate(LENGTHS):
        slots = texts.slot_mapping(row, 0, length + 1)
        store_kv(texts.keys[row], texts.values[row], key_pages, value_pages, slots)
    decodes, count = layout.decodes[0], len(LENGTHS)
    pages = AttentionMetadata(
        torch.arange(count + 1).int(), decodes.seq_lens.int(), decodes.block_tables.int(), layout.slot_mapping,
        max_seq_len=max(LENGTHS) + 1, query_lens=[1] * count,
    )  # fmt: skip
    assert torch.equal(result, paged_attention(queries, key_pages, value_pages, pages, SCALE))


def test_prefill_and_decode_in_one_batch() -> None:
    """Prefill and decode rows of a batch are told apart in any order."""
    selection = SparseAttentionConfig(Quest(), page_size=PAGE, token_budget=3 * PAGE, sink_pages=1, recent_pages=1)
    attention, texts = build_attention(selection), Texts([30, 11])
    texts.read(attention, chunk=64)
    other = Texts([9])
    free = torch.tensor(
        [block for block in range(BLOCKS) if not any(block in used_blocks for used_blocks in texts.blocks)]
    )
    other.blocks = [free[:3]]
    new, prompt = texts.new(), other.slot_mapping(0, 0, 9)
    decodes = new.decodes[0]
    swapped = DecodeBatch(torch.tensor([10, 0]), decodes.seq_lens, decodes.block_tables, decodes.request_ids)
    slots = torch.cat([new.slot_mapping[1:], prompt, new.slot_mapping[:1]])
    filled = torch.cat([new.filled_blocks, other.blocks[0][:2]])
    layout = SparseBatch(2, slots, filled, [PrefillChunk(slice(1, 10), 9, other.blocks[0])], [swapped])
    queries = torch.randn(11, KV_HEADS * GROUP, WIDTH)
    keys = torch.cat([texts.keys[1][-1:], other.keys[0][:9], texts.keys[0][-1:]])
    values = torch.cat([texts.values[1][-1:], other.values[0][:9], texts.values[0][-1:]])
    actual = attention.attend(0, queries, keys, values, layout, SCALE)
    reference = expected(queries[1:10], other.keys[0][:9], other.values[0][:9], None)
    torch.testing.assert_close(actual[1:10], reference, atol=1e-5, rtol=1e-5)
    for row, query in ((0, 10), (1, 0)):
        visible = pages_by_hand(selection, queries[query], texts.keys[row])
        reference = expected(queries[query : query + 1], texts.keys[row], texts.values[row], visible)
        torch.testing.assert_close(actual[query : query + 1], reference, atol=1e-5, rtol=1e-5)


def test_requests_that_do_not_fit_together_are_split_in_order() -> None:
    decodes = DecodeBatch(torch.arange(5), torch.arange(5) + 1, torch.arange(5)[:, None], list("abcde"))
    parts = list(decodes.split([3, 3, 2, 6, 1], max_pages=6))
    assert ["".join(part.request_ids) for part in parts] == ["ab", "c", "d", "e"]
    assert [part.seq_lens.tolist() for part in parts] == [[1, 2], [3], [4], [5]]
    assert [len(part.token_indices) for part in decodes.split([1] * 5, max_pages=6)] == [5]
