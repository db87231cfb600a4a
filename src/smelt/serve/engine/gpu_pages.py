"""The paged KV cache of a GPU runner: its block tables on the device, and attention over its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.models.model import Model
from smelt.runtime.decoder import Attention
from smelt.serve.engine.attention import PagedCache
from smelt.serve.engine.block_table import BlockTables, ToDevice
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.runner import cumulative_lens
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

if TYPE_CHECKING:  # needs Triton
    from smelt.kernels.gpu.prefill import PageList
    from smelt.runtime.gpu import Attend, FusedNetwork


MAX_PREFILL_CHUNKS = 16
MIN_LONG_CONTEXT = 2048  # tokens of the longest request from which on attention takes large tiles
_TILE = 64  # query tokens per tile of attention, as PREFILL_TILES


@dataclass(frozen=True)
class PrefillInputs:
    """Prompt chunks on the device, padded to fixed numbers of tokens and chunks, so that a CUDA graph can read them.

    The padding is a last chunk without tokens; its slot, and that of tokens and rows of padding, is the padding slot.
    """

    token_ids: Tensor  # [size], as are slots and positions
    slots: Tensor
    positions: Tensor
    logits_rows: Tensor  # [MAX_PREFILL_CHUNKS]: the tokens that need logits; the next: their slots
    logits_slots: Tensor
    cu_seqlens_q: Tensor  # [MAX_PREFILL_CHUNKS + 2]
    seq_lens: Tensor  # [MAX_PREFILL_CHUNKS + 1], as is chunk_slots
    chunk_slots: Tensor
    tile_requests: Tensor  # [size / 64 + MAX_PREFILL_CHUNKS], as is tile_first
    tile_first: Tensor

    @classmethod
    def split(cls, values: Tensor, size: int) -> tuple[PrefillInputs, Tensor]:
        """View the parts of what `pack` returns, and what follows it."""
        sizes = cls._sizes(size)
        *parts, rest = values.split([*sizes, len(values) - sum(sizes)])
        return cls(*parts), rest

    @classmethod
    def pack(
        cls, tokens: np.ndarray[Any, Any], chunks: Sequence[ScheduledChunk], rows: list[int], size: int,
        padding_slot: int,
    ) -> np.ndarray[Any, Any]:  # fmt: skip
        """Return all parts as one int64 array; `tokens` [3, tokens] are the ids, slots and positions."""
        sizes = cls._sizes(size)
        values = np.zeros(sum(sizes), dtype=np.int64)
        parts = np.split(values, np.cumsum(sizes)[:-1])
        ids, slots, positions, logits_rows, logits_slots, cu_seqlens_q, seq_lens, chunk_slots, requests, first = parts
        count = tokens.shape[1]
        ids[:count], slots[:count], positions[:count] = tokens
        slots[count:] = padding_slot
        logits_rows[: len(rows)] = rows
        logits_slots[: len(rows)], logits_slots[len(rows) :] = slots[rows], padding_slot
        cu_seqlens_q[1 : len(chunks) + 1] = np.cumsum([chunk.count for chunk in chunks])
        cu_seqlens_q[len(chunks) + 1 :] = count
        seq_lens[: len(chunks)] = [chunk.start + chunk.count for chunk in chunks]
        chunk_slots[: len(chunks)] = [chunk.request.slot for chunk in chunks]
        chunk_slots[len(chunks) :] = padding_slot
        tiles = [(number, start) for number, chunk in enumerate(chunks) for start in range(0, chunk.count, _TILE)]
        requests[: len(tiles)] = [number for number, _ in tiles]
        requests[len(tiles) :] = MAX_PREFILL_CHUNKS
        first[: len(tiles)] = [start for _, start in tiles]
        return values

    @staticmethod
    def _sizes(size: int) -> list[int]:
        chunks, tiles = MAX_PREFILL_CHUNKS, size // _TILE + MAX_PREFILL_CHUNKS
        return [size, size, size, chunks, chunks, chunks + 2, chunks + 1, chunks + 1, tiles, tiles]


class GpuPages(Protocol):
    """What a GPU runner needs of its KV cache."""

    name: str  # appended to the backend name

    def is_decode(self, chunk: ScheduledChunk) -> bool:
        """Return whether a chunk is a single token that the decode kernel can compute."""

    def prepare(self, batch: ScheduledBatch) -> None:
        """Copy what changed since the last step to the device."""

    def decode_attention(self, slots: Tensor, seq_lens: Tensor, network: FusedNetwork, max_seq_len: int) -> Attend:
        """Return attention of one token per request, with sequences of at most `max_seq_len` tokens; it must not depend
        on the step, so that it can be captured."""

    def varlen_attention(
        self, chunks: Sequence[ScheduledChunk], slots: Tensor, positions: Tensor, network: FusedNetwork
    ) -> Attend:
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
        self._to_device = to_device
        self.cache = PagedCache.empty(
            model.anatomy, num_blocks, block_size, model.network.dtype, model.device, kv_cache_dtype
        )
        shape = (max_num_seqs + 1, -(-max_model_len // block_size))  # the last row is for padding
        self._tables = torch.zeros(shape, dtype=torch.int32, device=model.device)
        self._block_tables = BlockTables(self._tables, to_device)

    def is_decode(self, chunk: ScheduledChunk) -> bool:
        return chunk.count == 1

    def prepare(self, batch: ScheduledBatch) -> None:
        self._block_tables.update(batch.chunks)

    def decode_attention(self, slots: Tensor, seq_lens: Tensor, network: FusedNetwork, max_seq_len: int) -> Attend:
        from smelt.kernels.gpu import hopper_attention
        from smelt.kernels.gpu.paged import DecodeMetadata, paged_decode
        from smelt.kernels.gpu.rope import rope_and_store_kv

        metadata = DecodeMetadata(slots, seq_lens, self._tables, network.split_counter, max_seq_len)

        @cache
        def new_tokens() -> tuple[Tensor, Tensor]:
            """Return positions and slots of the new tokens, for kernels that do not find them themselves."""
            positions = (seq_lens - 1).clamp(min=0)
            blocks = self._tables[slots, positions // self.block_size].long()
            slot_mapping = blocks * self.block_size + positions % self.block_size
            return positions, torch.where(seq_lens > 0, slot_mapping, -1)

        def attend(qkv: Tensor, part: Attention) -> Tensor:
            keys, values, *_, kv_quant = self.cache.layer(part.layer)
            rope = network.rotary_params(part)
            if part.sinks is not None:
                return paged_decode(
                    qkv, keys, values, metadata, rope, part.scale, part.window, kv_quant=kv_quant, sinks=part.sinks
                )
            if hopper_attention.supports_decode_few(qkv, keys, kv_quant, max_seq_len, rope):
                return hopper_attention.decode_few(qkv, keys, values, metadata, rope, part.scale, part.window)
            sizes = part.num_heads, part.num_kv_heads, self.block_size, max_seq_len
            if not hopper_attention.supports_decode(kv_quant, qkv, *sizes):
                return paged_decode(qkv, keys, values, metadata, rope, part.scale, part.window, kv_quant=kv_quant)
            queries = rope_and_store_kv(qkv, *new_tokens(), rope, keys, values, kv_quant=kv_quant)
            output = hopper_attention.decode(queries, keys, values, kv_quant, metadata, part.scale, part.window)
            return output.flatten(1)

        return attend

    def varlen_attention(
        self, chunks: Sequence[ScheduledChunk], slots: Tensor, positions: Tensor, network: FusedNetwork
    ) -> Attend:
        from smelt.kernels.gpu import hopper_attention
        from smelt.kernels.gpu.paged import QueryTiles, prefill_config
        from smelt.kernels.gpu.prefill import PrefillAttention
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
        pages = None if first.kv_quant is None else self._page_list(rows, seq_lens)
        is_long = metadata.max_seq_len >= MIN_LONG_CONTEXT
        prefill = PrefillAttention(
            metadata, tiles, lambda tokens: sum(-(-count // tokens) for count in query_lens),
            hopper_attention.LONG if is_long else hopper_attention.SHORT, pages,
        )  # fmt: skip

        def attend(qkv: Tensor, part: Attention) -> Tensor:
            keys, values, *_, kv_quant = self.cache.layer(part.layer)
            queries = rope_and_store_kv(
                qkv, positions, slot_mapping, network.rotary_params(part), keys, values, kv_quant=kv_quant
            )
            return prefill(queries, keys, values, part.scale, part.window, kv_quant, part.sinks).flatten(1)

        return attend

    def _page_list(self, rows: Tensor, seq_lens: np.ndarray[Any, Any]) -> PageList:
        """Return the blocks of chunks whose block tables are these rows."""
        from smelt.kernels.gpu.prefill import PageList

        counts = -(-seq_lens // self.block_size)
        chunk = np.repeat(np.arange(len(counts)), counts)
        first = np.cumsum(counts) - counts
        index = self._to_device(np.stack((chunk, np.arange(len(chunk)) - first[chunk])))
        block_tables = first[:, None] + np.arange(counts.max())  # beyond the blocks of a chunk they are not read
        return PageList(self._tables[rows[index[0]], index[1]], self._to_device(block_tables.astype(np.int32)))

    def prefill_attention(self, inputs: PrefillInputs, network: FusedNetwork) -> Attend:
        """Return attention of chunks that are described on the device alone, so that it can be captured."""
        from smelt.kernels.gpu import hopper_attention
        from smelt.kernels.gpu.paged import PREFILL_TILES, QueryTiles
        from smelt.kernels.gpu.prefill import PrefillAttention
        from smelt.kernels.gpu.rope import rope_and_store_kv

        slots, positions = inputs.slots, inputs.positions
        blocks = self._tables[slots, positions // self.block_size].long()
        written = slots < len(self._tables) - 1  # -1: padding is not stored
        slot_mapping = torch.where(written, blocks * self.block_size + positions % self.block_size, -1)
        metadata = AttentionMetadata(
            cu_seqlens_q=inputs.cu_seqlens_q.int(), seq_lens=inputs.seq_lens.int(),
            block_tables=self._tables[inputs.chunk_slots], slot_mapping=slot_mapping, max_seq_len=self.max_model_len,
            query_lens=[],
        )  # fmt: skip
        tiles = QueryTiles(inputs.tile_requests, inputs.tile_first, *PREFILL_TILES)
        assert tiles.block_m == _TILE
        prefill = PrefillAttention(
            metadata, tiles, lambda tokens: len(slots) // tokens + MAX_PREFILL_CHUNKS, hopper_attention.SHORT
        )

        def attend(qkv: Tensor, part: Attention) -> Tensor:
            keys, values, *_, kv_quant = self.cache.layer(part.layer)
            rope = network.rotary_params(part)
            queries = rope_and_store_kv(qkv, positions, slot_mapping, rope, keys, values, kv_quant=kv_quant)
            return prefill(queries, keys, values, part.scale, part.window, kv_quant, part.sinks).flatten(1)

        return attend

    def finish(self, batch: ScheduledBatch) -> None:
        """Do nothing: every token stays in its slot."""
