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
from smelt.serve.engine.attention import Attend, rows_of
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
        kind: str | None = None,
    ) -> None:
        heads = sparse_attention_heads(model)
        rows = {layer: rows_of(kind, width) for layer, (_, width) in heads.items()}
        _check_page(selection, block_size)
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
        self.kind = kind
        pages: DevicePageStore | HostPageStore
        row_shapes = {
            layer: (count, row_layout(rows[layer], width, self.dtype)[0]) for layer, (count, width) in heads.items()
        }
        page_dtype = self.dtype if kind is None else KVQuantFormat.dtype
        if kv_offload is None:
            pages = DevicePageStore(row_shapes, num_blocks, block_size, page_dtype, self.device)
        else:
            kv_offload = dataclasses.replace(kv_offload, num_slots=min(kv_offload.num_slots, num_blocks))
            _check_slots(selection, kv_offload, min(max_model_len, num_blocks * block_size))
            pages = self.host = HostPageStore(row_shapes, num_blocks, block_size, page_dtype, self.device, kv_offload)
        self.recorder = TraceRecorder(trace_metadata(model, selection, kv_offload, rows)) if record else None
        summaries = PageSummaryTable(selection.summary, heads, num_blocks, self.dtype, self.device)
        self.attention = SparsePageAttention(selection, pages, summaries, self.recorder, rows)
        self.steps = 0
        self._known: dict[Request, list[int]] = {}  # requests that may have pages on the device -> blocks

    @property
    def backend(self) -> str:
        where = "" if self.host is None else " from host memory"
        return f"eager, sparse page attention{where}{backend_suffix(self.kind)}"

    @property
    def resident_pages(self) -> int:
        """Return how many offloaded pages of running requests are cached on the device, over layers and heads."""
        self._forget()
        return 0 if self.host is None else sum(resident.count for resident in self.host.residents.values())

    def launch(self, step: ScheduledBatch) -> InflightBatch:
        self.steps += 1
        self._forget()
        self._known |= {chunk.request: chunk.request.blocks for chunk in step.pieces}
        self._now = self._layout(step.pieces)
        inflight = super().launch(step)
        self.attention.page_store.end_step(self.steps)
        return inflight

    def _attend(self, pages: AttentionMetadata) -> Attend:
        """Return attention over selected pages in place of paged attention."""

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, _: int | None) -> Tensor:
            return self.attention.attend(layer, queries, keys, values, self._now, scale)

        return attend

    def _forget(self) -> None:
        """Drop the device's pages of requests that finished or were preempted."""
        ended = [
            request
            for request, blocks in self._known.items()
            if request.state is not RequestStatus.RUNNING or request.blocks is not blocks
        ]
        for request in ended:
            del self._known[request]
        if ended:
            blocks = [block for request_blocks in self._known.values() for block in request_blocks]
            self.attention.page_store.retain_blocks(torch.tensor(blocks, dtype=torch.int64))

    def _layout(self, pieces: list[ScheduledChunk]) -> SparseBatch:
        slot_mapping, filled, prefill, decode = [], [], [], []
        offset = 0
        for chunk in pieces:
            blocks = torch.tensor(chunk.request.blocks)
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
        return SparseBatch(self.steps, torch.cat(slot_mapping), torch.cat(filled), prefill, list(self._waves(decode)))

    def _waves(self, asking: list[tuple[int, int, Request]]) -> Iterator[DecodeBatch]:
        """Yield all decode requests in one batch, or as many at a time as the device has page slots for."""
        if not asking:
            return
        lengths = torch.tensor([length for _, length, _ in asking])
        tables = torch.zeros(len(asking), -(-int(lengths.max()) // self.block_size), dtype=torch.int64)
        for row, (_, length, request) in enumerate(asking):
            num_pages = -(-length // self.block_size)
            tables[row, :num_pages] = torch.tensor(request.blocks[:num_pages])
        tokens = torch.tensor([token for token, _, _ in asking])
        batch = DecodeBatch(
            tokens.to(self.device),
            lengths.to(self.device),
            tables.to(self.device),
            [str(owner.id) for _, _, owner in asking],
        )
        max_pages = self.attention.page_store.max_pages_per_call
        if max_pages is None:
            yield batch
        else:
            yield from batch.split(self.attention.config.num_selected_pages(lengths).tolist(), max_pages)


def _check_page(selection: SparseAttentionConfig, block_size: int) -> None:
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
