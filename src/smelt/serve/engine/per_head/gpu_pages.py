"""Pages of head clusters on a GPU: decoding reads its work split from a precomputed table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kvcache.eviction.policy import EvictionPolicy
from smelt.kvcache.rope import rope_functions
from smelt.models.model import Model
from smelt.runtime.decoder import Attention
from smelt.serve.engine.block_table import ToDevice
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.per_head.cache import PerHeadCache
from smelt.serve.engine.per_head.cache_manager import per_head_state
from smelt.serve.engine.per_head.compress import ChunkCompressor
from smelt.serve.engine.per_head.kv_splits import MAX_SPLITS, build_split_work, choose_num_splits
from smelt.serve.engine.per_head.step import PerHeadTables, build_batch
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

if TYPE_CHECKING:  # needs Triton
    from smelt.kernels.gpu.pages import ClusteredHeadPages
    from smelt.runtime.gpu import Attend, FusedNetwork


class PerHeadGpuPages:
    """Implement `GpuPages` for a per-head KV cache."""

    def __init__(
        self, model: Model, cache: PerHeadCache, policy: EvictionPolicy, max_model_len: int, to_device: ToDevice
    ) -> None:
        self.name = f", per-head cache{backend_suffix(None if cache.kv_quant is None else cache.kv_quant.name)}"
        self.cache, self.policy, self.max_model_len = cache, policy, max_model_len
        self._to_device = to_device
        self._compress = ChunkCompressor(*rope_functions(model.network, model.device))
        self._tables = PerHeadTables(cache, to_device)
        self._layers: dict[tuple[int, int], tuple[ClusteredHeadPages, int]] = {}

    def is_decode(self, chunk: ScheduledChunk) -> bool:
        return chunk.count == 1 and chunk.start >= per_head_state(chunk.request).retention.stop

    def prepare(self, batch: ScheduledBatch) -> None:
        self._tables.prepare(batch)

    def finish(self, batch: ScheduledBatch) -> None:
        self._tables.finish(batch)

    def decode_attention(self, slots: Tensor, seq_lens: Tensor, network: FusedNetwork, max_seq_len: int) -> Attend:
        from smelt.kernels.gpu.paged import DecodeMetadata, paged_decode

        metadata = DecodeMetadata(slots, seq_lens, self.cache.block_tables, network.split_counter, self.max_model_len)

        def attend(qkv: Tensor, part: Attention) -> Tensor:
            head_pages, splits = self._layer(part.layer, len(slots))
            return paged_decode(
                qkv, self.cache.keys, self.cache.values, metadata, network.rotary_params(part), part.scale,
                head_pages=head_pages, splits=splits, kv_quant=self.cache.kv_quant,
            )  # fmt: skip

        return attend

    def varlen_attention(
        self, chunks: Sequence[ScheduledChunk], slots: Tensor, positions: Tensor, network: FusedNetwork
    ) -> Attend:
        from smelt.kernels.gpu.paged import QueryTiles, paged_prefill, prefill_config
        from smelt.kernels.gpu.rope import rope_and_store_kv

        batch = build_batch(self.cache, chunks, torch.stack((slots, positions)), self._to_device)
        cache, kv_quant = self.cache, self.cache.kv_quant
        metadata = AttentionMetadata(
            cu_seqlens_q=batch.cu_seqlens_q, seq_lens=batch.seq_lens, block_tables=cache.block_tables,
            slot_mapping=positions, max_seq_len=batch.max_seq_len, query_lens=batch.query_lens,
        )  # fmt: skip
        tiles = QueryTiles.from_query_lens(
            batch.query_lens, slots.device, prefill_config(metadata, cache.keys.shape[-1], kv_quant)
        )

        def attend(qkv: Tensor, part: Attention) -> Tensor:
            head_pages, _ = self._layer(part.layer, len(chunks))
            queries = rope_and_store_kv(
                qkv, positions, slots, network.rotary_params(part), cache.keys, cache.values, head_pages, kv_quant
            )
            output = paged_prefill(
                queries, cache.keys, cache.values, metadata, part.scale, tiles=tiles, head_pages=head_pages,
                slots=batch.request_slots, kv_quant=kv_quant,
            )  # fmt: skip
            # Scoring dequantizes keys, which undoes their Hadamard rotation, so the queries must be unrotated as well.
            self._compress(batch, part.layer, queries if kv_quant is None else kv_quant.unrotate(queries), part.scale)
            return output.flatten(1)

        return attend

    def _layer(self, layer: int, num_requests: int) -> tuple[ClusteredHeadPages, int]:
        """Return a layer's head pages and its maximum splits per head, rounded up to a power of two; cached per
        power of two of requests."""
        from smelt.kernels.gpu.arch import num_sms
        from smelt.kernels.gpu.paged import BLOCK_N, num_splits
        from smelt.kernels.gpu.pages import ClusteredHeadPages

        num_requests = 1 << (num_requests - 1).bit_length()
        if (layer, num_requests) not in self._layers:
            cache = self.cache
            shares, sms = tuple(self.policy.head_splits[layer].tolist()), num_sms(cache.keys.device)
            max_splits = max(min(MAX_SPLITS, self.max_model_len // (2 * BLOCK_N)), 1)
            uniform = (num_splits(num_requests, len(shares), self.max_model_len, sms),) * len(shares)
            splits = uniform if len(set(shares)) == 1 else choose_num_splits(shares, num_requests, sms, max_splits)
            head_pages = ClusteredHeadPages(
                cache.block_tables, cache.seq_len_offsets, cache.cluster[layer], cache.column[layer],
                cache.heads_per_page,
                torch.tensor(build_split_work(shares, splits), dtype=torch.int32, device=cache.keys.device),
            )  # fmt: skip
            self._layers[layer, num_requests] = head_pages, 1 << (max(splits) - 1).bit_length()
        return self._layers[layer, num_requests]
