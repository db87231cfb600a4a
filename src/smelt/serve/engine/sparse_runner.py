"""A runner that evicts nothing and reads little: each step of an answer attends to the pages its queries point to.

Prompts attend to all of themselves; so do the tokens of an answer that are computed again after a preemption. Pages
lie on the device, or, with a residence, on the host, and the device holds those that were chosen lately.
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
    """Runs the network as it is. No program knows selection, so that `compiled` changes nothing."""

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
        super().__init__(  # its pages are ours, and not of this cache: one block is the least it has
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
        held = {
            layer: (count, row_layout(rows[layer], width, self.dtype)[0]) for layer, (count, width) in heads.items()
        }
        of = self.dtype if kind is None else KVQuantFormat.dtype
        if kv_offload is None:
            pages = DevicePageStore(held, num_blocks, block_size, of, self.device)
        else:
            kv_offload = dataclasses.replace(kv_offload, num_slots=min(kv_offload.num_slots, num_blocks))
            _check_slots(selection, kv_offload, min(max_model_len, num_blocks * block_size))
            pages = self.host = HostPageStore(held, num_blocks, block_size, of, self.device, kv_offload)
        self.recorder = TraceRecorder(trace_metadata(model, selection, kv_offload, rows)) if record else None
        digested = PageSummaryTable(selection.summary, heads, num_blocks, self.dtype, self.device)
        self.attention = SparsePageAttention(selection, pages, digested, self.recorder, rows)
        self.steps = 0
        self._known: dict[Request, list[int]] = {}  # requests whose pages may be on the device, and their blocks

    @property
    def backend(self) -> str:
        where = "" if self.host is None else " from host memory"
        return f"eager, sparse page attention{where}{backend_suffix(self.kind)}"

    @property
    def resident_pages(self) -> int:
        """Pages of running requests that are on the device though their home is the host, over layers and heads."""
        self._forget()
        return 0 if self.host is None else sum(each.count for each in self.host.residents.values())

    def launch(self, step: ScheduledBatch) -> InflightBatch:
        self.steps += 1
        self._forget()
        self._known |= {piece.request: piece.request.blocks for piece in step.pieces}
        self._now = self._layout(step.pieces)
        launched = super().launch(step)
        self.attention.page_store.end_step(self.steps)
        return launched

    def _attend(self, pages: AttentionMetadata) -> Attend:
        """Over pages that are chosen, wherever the plain ones would be."""

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, _: int | None) -> Tensor:
            return self.attention.attend(layer, queries, keys, values, self._now, scale)

        return attend

    def _forget(self) -> None:
        """Pages of requests that ended or were preempted leave the device."""
        gone = [
            request
            for request, blocks in self._known.items()
            if request.state is not RequestStatus.RUNNING or request.blocks is not blocks
        ]
        for request in gone:
            del self._known[request]
        if gone:
            blocks = [block for held in self._known.values() for block in held]
            self.attention.page_store.retain_blocks(torch.tensor(blocks, dtype=torch.int64))

    def _layout(self, pieces: list[ScheduledChunk]) -> SparseBatch:
        places, filled, reading, asking = [], [], [], []
        at = 0
        for piece in pieces:
            blocks = torch.tensor(piece.request.blocks)
            stop = piece.start + piece.count
            positions = torch.arange(piece.start, stop)
            places.append(blocks[positions // self.block_size] * self.block_size + positions % self.block_size)
            filled.append(blocks[piece.start // self.block_size : stop // self.block_size])
            if piece.count == 1 and piece.start >= len(piece.request.prompt):
                asking.append((at, stop, piece.request))
            else:
                reading.append(PrefillChunk(slice(at, at + piece.count), stop, blocks[: -(-stop // self.block_size)]))
            at += piece.count
        return SparseBatch(self.steps, torch.cat(places), torch.cat(filled), reading, list(self._waves(asking)))

    def _waves(self, asking: list[tuple[int, int, Request]]) -> Iterator[DecodeBatch]:
        """All requests that ask, or as many at once as the device has slots for."""
        if not asking:
            return
        lengths = torch.tensor([length for _, length, _ in asking])
        tables = torch.zeros(len(asking), -(-int(lengths.max()) // self.block_size), dtype=torch.int64)
        for row, (_, length, request) in enumerate(asking):
            held = -(-length // self.block_size)
            tables[row, :held] = torch.tensor(request.blocks[:held])
        tokens = torch.tensor([token for token, _, _ in asking])
        together = DecodeBatch(
            tokens.to(self.device),
            lengths.to(self.device),
            tables.to(self.device),
            [str(each.id) for _, _, each in asking],
        )
        most = self.attention.page_store.max_pages_per_call
        if most is None:
            yield together
        else:
            yield from together.split(self.attention.config.num_selected_pages(lengths).tolist(), most)


def _check_page(selection: SparseAttentionConfig, block_size: int) -> None:
    if selection.page_size != block_size:
        told = f"pages of {selection.page_size} tokens are to be chosen, and the engine's blocks have {block_size}"
        raise ConfigError(
            f"{told}; give the engine blocks of {selection.page_size}, or the selection pages of {block_size}."
        )


def _check_slots(selection: SparseAttentionConfig, kv_offload: OffloadConfig, max_model_len: int) -> None:
    most = selection.max_selected_pages(max_model_len)
    if most > kv_offload.num_slots:
        told = f"a head attends to up to {most} pages of one request, and the device has {kv_offload.num_slots} slots"
        raise ConfigError(f"{told} for it; give more slots or a smaller budget.")
