"""The paged KV cache of a GPU runner: its block tables on the device, and attention over its pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.models.model import Model
from smelt.runtime.decoder import Attention
from smelt.serve.engine.attention import NAME, PagedCache, paged
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.runner import module_logits
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

if TYPE_CHECKING:  # needs Triton
    from smelt.runtime.gpu import Attend, FusedNetwork

Send = Callable[[np.ndarray[Any, Any]], Tensor]  # to the device


@dataclass(frozen=True)
class Mixed:
    """A step with prompt chunks, possibly beside decode tokens."""

    attend: Attend
    logits: Callable[[Tensor, Tensor], Tensor]  # eager, from ids and the rows that need logits


class GpuPages(Protocol):
    """What a GPU runner needs of its KV cache."""

    name: str  # appended to the backend name

    def single(self, piece: ScheduledChunk) -> bool:
        """Return whether a chunk is a single token that the decode kernel can compute."""

    def before(self, step: ScheduledBatch) -> None:
        """Send what changed since the last step to the device."""

    def decoding(self, slots: Tensor, lengths: Tensor, network: FusedNetwork) -> Attend:
        """Return attention of one token per request; it must not depend on the step, so that it can be captured."""

    def mixed(self, pieces: list[ScheduledChunk], slots: Tensor, positions: Tensor, network: FusedNetwork) -> Mixed: ...

    def after(self, step: ScheduledBatch) -> None:
        """Update the cache after the step."""


class PagedGpuPages:
    """Pages that hold every token, for all heads of a layer."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        kind: str | None,
        send: Send,
    ) -> None:
        self.name = backend_suffix(kind)
        self.block_size, self.max_model_len, self._send, self._module = block_size, max_model_len, send, model.network
        self.cache = PagedCache.empty(model.anatomy, num_blocks, block_size, model.network.dtype, model.device, kind)
        model.network.set_attn_implementation(NAME)
        self._tables = torch.zeros(
            max_num_seqs + 1, -(-max_model_len // block_size), dtype=torch.int32, device=model.device
        )
        self._written: list[tuple[list[int], int]] = [
            ([], 0)
        ] * max_num_seqs  # per row: blocks, and how many are written

    def single(self, piece: ScheduledChunk) -> bool:
        return piece.count == 1

    def before(self, step: ScheduledBatch) -> None:
        """Write blocks allocated since the last step to the block tables, in one copy."""
        entries, blocks = [], []
        width = self._tables.shape[1]
        for chunk in step.pieces:
            request = chunk.request
            written, count = self._written[request.slot]
            if written is not request.blocks:  # another request's, or its own before a preemption
                count = 0
            if count < len(request.blocks):
                entries += [request.slot * width + index for index in range(count, len(request.blocks))]
                blocks += request.blocks[count:]
                self._written[request.slot] = (request.blocks, len(request.blocks))
        if blocks:
            update = self._send(np.array([entries, blocks], dtype=np.int64))
            self._tables.view(-1)[update[0]] = update[1].int()

    def decoding(self, slots: Tensor, lengths: Tensor, network: FusedNetwork) -> Attend:
        from smelt.kernels.gpu.paged import DecodeMetadata, paged_decode

        metadata = DecodeMetadata(slots, lengths, self._tables, network.arrived, self.max_model_len)

        def attend(mixed: Tensor, part: Attention) -> Tensor:
            keys, values, *_, kv_quant = self.cache.layer(part.index)
            rope = network.rotation(part)
            return paged_decode(mixed, keys, values, metadata, rope, part.scale, part.window, kv_quant=kv_quant)

        return attend

    def mixed(self, pieces: list[ScheduledChunk], slots: Tensor, positions: Tensor, network: FusedNetwork) -> Mixed:
        from smelt.kernels.gpu.paged import QueryTiles, paged_prefill, prefill_config
        from smelt.kernels.gpu.rope import rope_and_store_kv

        counts = [chunk.count for chunk in pieces]
        lengths = np.array([chunk.start + chunk.count for chunk in pieces], dtype=np.int32)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = self._send(np.array([chunk.request.slot for chunk in pieces], dtype=np.int64))
        slot_mapping = (
            self._tables[slots, positions // self.block_size].long() * self.block_size + positions % self.block_size
        )
        metadata = AttentionMetadata(
            cu_seqlens_q=self._send(bounds), seq_lens=self._send(lengths), block_tables=self._tables[rows],
            slot_mapping=slot_mapping, max_seq_len=int(lengths.max()), query_lens=counts,
        )  # fmt: skip
        first = self.cache.layer(min(self.cache.keys))
        tiles = QueryTiles.of(counts, slots.device, prefill_config(metadata, first.keys.shape[-1], first.kv_quant))

        def attend(mixed: Tensor, part: Attention) -> Tensor:
            keys, values, *_, kv_quant = self.cache.layer(part.index)
            queries = rope_and_store_kv(
                mixed, positions, slot_mapping, network.rotation(part), keys, values, kv_quant=kv_quant
            )
            output = paged_prefill(
                queries, keys, values, metadata, part.scale, part.window, tiles=tiles, kv_quant=kv_quant
            )
            return output.flatten(1)

        def logits(ids: Tensor, wanted: Tensor) -> Tensor:
            return module_logits(self._module, paged(self.cache, metadata), ids, positions, wanted)

        return Mixed(attend, logits)

    def after(self, step: ScheduledBatch) -> None:
        """Do nothing: every token stays in its slot."""
