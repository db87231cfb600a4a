"""A runner with sparse page attention: nothing is evicted, and each decode step attends to the pages it selects.

Prefill attends to everything, also when output tokens are recomputed after a preemption. Pages are on the device or,
with an offload config, in host memory, and the device caches those selected recently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kernels.kv_quant import KVQuantFormat, row_layout
from smelt.kvcache.selection.config import SparseAttentionConfig, sparse_attention_heads
from smelt.kvcache.selection.host_store import HostPageStore
from smelt.kvcache.selection.page_cache import OffloadConfig
from smelt.kvcache.selection.page_store import DevicePageStore
from smelt.kvcache.selection.page_summary import PageSummaryTable
from smelt.kvcache.selection.sparse_attention import DecodeBatch, PrefillChunk, SparseBatch, SparsePageAttention
from smelt.kvcache.selection.trace import TraceRecorder, trace_metadata
from smelt.models.model import Model
from smelt.serve.engine.adapters import Adapters
from smelt.serve.engine.attention import AttentionFn, kv_quant_format
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.request import Request, RequestStatus
from smelt.serve.engine.runner import InflightBatch, ModelRunner
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk


class SparseRunner(ModelRunner):
    """Run the network eagerly: no compiled program has page selection, so `compiled` has no effect."""

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        selection: SparseAttentionConfig,
        kv_offload: OffloadConfig | None = None,
        record: bool = False,
        compiled: bool = True,
        adapters: Adapters | None = None,
        kv_cache_dtype: str | None = None,
    ) -> None:
        heads = sparse_attention_heads(model)
        kv_formats = {layer: kv_quant_format(kv_cache_dtype, head_dim) for layer, (_, head_dim) in heads.items()}
        _check_page_size(selection, block_size)
        super().__init__(  # pages are in our own store: its cache gets one block, the minimum
            model,
            num_blocks=1,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            compiled=False,
            adapters=adapters,
        )
        self.host: HostPageStore | None = None
        self.kv_cache_dtype = kv_cache_dtype
        pages: DevicePageStore | HostPageStore
        row_shapes = {
            layer: (num_kv_heads, row_layout(kv_formats[layer], head_dim, self.dtype)[0])
            for layer, (num_kv_heads, head_dim) in heads.items()
        }
        page_dtype = self.dtype if kv_cache_dtype is None else KVQuantFormat.dtype
        if kv_offload is None:
            pages = DevicePageStore(row_shapes, num_blocks, block_size, page_dtype, self.device)
        else:
            kv_offload = dataclasses.replace(kv_offload, num_slots=min(kv_offload.num_slots, num_blocks))
            _check_slots(selection, kv_offload, min(max_model_len, num_blocks * block_size))
            pages = self.host = HostPageStore(row_shapes, num_blocks, block_size, page_dtype, self.device, kv_offload)
        self.recorder = TraceRecorder(trace_metadata(model, selection, kv_offload, kv_formats)) if record else None
        summaries = PageSummaryTable(selection.summary, heads, num_blocks, self.dtype, self.device)
        self.attention = SparsePageAttention(selection, pages, summaries, self.recorder, kv_formats)
        self.steps = 0
        self._tracked_blocks: dict[Request, list[int]] = {}  # requests that may have pages on the device -> blocks

    @property
    def backend(self) -> str:
        where = "" if self.host is None else " from host memory"
        return f"eager, sparse page attention{where}{backend_suffix(self.kv_cache_dtype)}"

    @property
    def resident_pages(self) -> int:
        """Return how many offloaded pages of running requests are cached on the device, over layers and heads."""
        self._drop_ended_requests()
        return 0 if self.host is None else sum(resident.count for resident in self.host.residents.values())

    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        self.steps += 1
        self._drop_ended_requests()
        self._tracked_blocks |= {chunk.request: chunk.request.blocks for chunk in batch.chunks}
        self._batch = self._build_batch(batch.chunks)
        inflight = super().launch(batch)
        self.attention.page_store.end_step(self.steps)
        return inflight

    def _attention_fn(self, metadata: AttentionMetadata) -> AttentionFn:
        """Return attention over selected pages in place of paged attention."""

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, _: int | None) -> Tensor:
            return self.attention.attend(layer, queries, keys, values, self._batch, scale)

        return attend

    def _drop_ended_requests(self) -> None:
        """Drop the device's pages of requests that finished or were preempted."""
        ended = [
            request
            for request, blocks in self._tracked_blocks.items()
            if request.state is not RequestStatus.RUNNING or request.blocks is not blocks
        ]
        for request in ended:
            del self._tracked_blocks[request]
        if ended:
            blocks = [block for request_blocks in self._tracked_blocks.values() for block in request_blocks]
            self.attention.page_store.retain_blocks(torch.tensor(blocks, dtype=torch.int64))

    def _build_batch(self, chunks: list[ScheduledChunk]) -> SparseBatch:
        self._block_tables.update(chunks)
        slot_mapping, filled, prefill, decode = [], [], [], []
        offset = 0
        for chunk in chunks:
            blocks = self._block_tables.tables[chunk.request.slot].long()
            stop = chunk.start + chunk.count
            positions = torch.arange(chunk.start, stop)
            slot_mapping.append(blocks[positions // self.block_size] * self.block_size + positions % self.block_size)
            filled.append(blocks[chunk.start // self.block_size : stop // self.block_size])
            if chunk.count == 1 and chunk.start >= len(chunk.request.prompt):
                decode.append((offset, stop, chunk.request))
            else:
                prefill.append(
                    PrefillChunk(slice(offset, offset + chunk.count), stop, blocks[: -(-stop // self.block_size)])
                )
            offset += chunk.count
        decodes = list(self._decode_batches(decode))
        return SparseBatch(self.steps, torch.cat(slot_mapping), torch.cat(filled), prefill, decodes)

    def _decode_batches(self, decodes: list[tuple[int, int, Request]]) -> Iterator[DecodeBatch]:
        """Yield all decode requests in one batch, or as many at a time as the device has page slots for."""
        if not decodes:
            return
        lengths = torch.tensor([length for _, length, _ in decodes])
        slots = torch.tensor([request.slot for _, _, request in decodes])
        tables = self._block_tables.tables[slots, : -(-int(lengths.max()) // self.block_size)].long()
        tokens = torch.tensor([token for token, _, _ in decodes])
        batch = DecodeBatch(
            tokens.to(self.device),
            lengths.to(self.device),
            tables.to(self.device),
            [str(request.id) for _, _, request in decodes],
        )
        max_pages = self.attention.page_store.max_pages_per_call
        if max_pages is None:
            yield batch
        else:
            yield from batch.split(self.attention.config.num_selected_pages(lengths).tolist(), max_pages)


def _check_page_size(selection: SparseAttentionConfig, block_size: int) -> None:
    if selection.page_size != block_size:
        cause = f"page_size is {selection.page_size}, and the engine's block_size is {block_size}"
        raise ConfigError(f"{cause}; set block_size to {selection.page_size}, or page_size to {block_size}.")


def _check_slots(selection: SparseAttentionConfig, kv_offload: OffloadConfig, max_model_len: int) -> None:
    max_pages = selection.max_selected_pages(max_model_len)
    if max_pages > kv_offload.num_slots:
        cause = (
            f"a head attends to up to {max_pages} pages of one request, and the device has {kv_offload.num_slots} slots"
        )
        raise ConfigError(f"{cause} for it; configure more slots or a smaller budget.")
