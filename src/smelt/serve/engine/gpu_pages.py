"""The paged KV cache of a GPU runner: its block tables on the device, and attention over its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.models.model import Model
from smelt.runtime.decoder import Attention
from smelt.serve.engine.attention import ATTN_IMPLEMENTATION, PagedCache, paged_attention_fn
from smelt.serve.engine.block_table import BlockTables, ToDevice
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.runner import cumulative_lens, eager_logits
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

if TYPE_CHECKING:  # needs Triton
    from smelt.runtime.gpu import Attend, FusedNetwork


@dataclass(frozen=True)
class VarlenAttention:
    """Attention of chunks of any length, for the fused network and for the eager one."""

    attend: Attend
    eager_logits: Callable[[Tensor, Tensor], Tensor]  # from ids and the rows that need logits


class GpuPages(Protocol):
    """What a GPU runner needs of its KV cache."""

    name: str  # appended to the backend name

    def is_decode(self, chunk: ScheduledChunk) -> bool:
        """Return whether a chunk is a single token that the decode kernel can compute."""

    def prepare(self, batch: ScheduledBatch) -> None:
        """Copy what changed since the last step to the device."""

    def decode_attention(self, slots: Tensor, seq_lens: Tensor, network: FusedNetwork) -> Attend:
        """Return attention of one token per request; it must not depend on the step, so that it can be captured."""

    def varlen_attention(
        self, chunks: Sequence[ScheduledChunk], slots: Tensor, positions: Tensor, network: FusedNetwork
    ) -> VarlenAttention:
        """Return attention of chunks of any length; slots and positions are those of each token."""

    def finish(self, batch: ScheduledBatch) -> None:
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
        kv_cache_dtype: str | None,
        to_device: ToDevice,
    ) -> None:
        self.name = backend_suffix(kv_cache_dtype)
        self.block_size, self.max_model_len = block_size, max_model_len
        self._to_device, self._module = to_device, model.network
        self.cache = PagedCache.empty(
            model.anatomy, num_blocks, block_size, model.network.dtype, model.device, kv_cache_dtype
        )
        model.network.set_attn_implementation(ATTN_IMPLEMENTATION)
        shape = (max_num_seqs + 1, -(-max_model_len // block_size))  # the last row is for padding
        self._tables = torch.zeros(shape, dtype=torch.int32, device=model.device)
        self._block_tables = BlockTables(self._tables, to_device)

    def is_decode(self, chunk: ScheduledChunk) -> bool:
        return chunk.count == 1

    def prepare(self, batch: ScheduledBatch) -> None:
        self._block_tables.update(batch.chunks)

    def decode_attention(self, slots: Tensor, seq_lens: Tensor, network: FusedNetwork) -> Attend:
        from smelt.kernels.gpu.paged import DecodeMetadata, paged_decode

        metadata = DecodeMetadata(slots, seq_lens, self._tables, network.split_counter, self.max_model_len)

        def attend(qkv: Tensor, part: Attention) -> Tensor:
            keys, values, *_, kv_quant = self.cache.layer(part.layer)
            rope = network.rotary_params(part)
            return paged_decode(qkv, keys, values, metadata, rope, part.scale, part.window, kv_quant=kv_quant)

        return attend

    def varlen_attention(
        self, chunks: Sequence[ScheduledChunk], slots: Tensor, positions: Tensor, network: FusedNetwork
    ) -> VarlenAttention:
        from smelt.kernels.gpu.paged import QueryTiles, paged_prefill, prefill_config
        from smelt.kernels.gpu.rope import rope_and_store_kv

        query_lens = [chunk.count for chunk in chunks]
        seq_lens = np.array([chunk.start + chunk.count for chunk in chunks], dtype=np.int32)
        rows = self._to_device(np.array([chunk.request.slot for chunk in chunks], dtype=np.int64))
        slot_mapping = (
            self._tables[slots, positions // self.block_size].long() * self.block_size + positions % self.block_size
        )
        metadata = AttentionMetadata(
            cu_seqlens_q=self._to_device(cumulative_lens(query_lens)), seq_lens=self._to_device(seq_lens),
            block_tables=self._tables[rows], slot_mapping=slot_mapping, max_seq_len=int(seq_lens.max()),
            query_lens=query_lens,
        )  # fmt: skip
        first = self.cache.layer(min(self.cache.keys))
        tiles = QueryTiles.from_query_lens(
            query_lens, slots.device, prefill_config(metadata, first.keys.shape[-1], first.kv_quant)
        )

        def attend(qkv: Tensor, part: Attention) -> Tensor:
            keys, values, *_, kv_quant = self.cache.layer(part.layer)
            queries = rope_and_store_kv(
                qkv, positions, slot_mapping, network.rotary_params(part), keys, values, kv_quant=kv_quant
            )
            output = paged_prefill(
                queries, keys, values, metadata, part.scale, part.window, tiles=tiles, kv_quant=kv_quant
            )
            return output.flatten(1)

        def logits(ids: Tensor, rows: Tensor) -> Tensor:
            return eager_logits(self._module, paged_attention_fn(self.cache, metadata), ids, positions, rows)

        return VarlenAttention(attend, logits)

    def finish(self, batch: ScheduledBatch) -> None:
        """Do nothing: every token stays in its slot."""
