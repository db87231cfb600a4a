"""Pages of head clusters on a GPU: decoding reads its work split from a precomputed table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kvcache.eviction.policy import EvictionPolicy
from smelt.kvcache.rope import rope_functions
from smelt.models.model import Model
from smelt.runtime.decoder import Attention
from smelt.serve.engine.attention import NAME
from smelt.serve.engine.gpu_pages import Mixed, Send
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.per_head.cache import PerHeadCache
from smelt.serve.engine.per_head.cache_manager import per_head_state
from smelt.serve.engine.per_head.compress import ChunkCompressor, per_head_attention
from smelt.serve.engine.per_head.parts import MOST_PARTS, parts_of, work_of
from smelt.serve.engine.per_head.step import Tables, step_of
from smelt.serve.engine.runner import module_logits
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

if TYPE_CHECKING:  # needs Triton
    from smelt.kernels.gpu.pages import ClusteredHeadPages
    from smelt.runtime.gpu import Attend, FusedNetwork


class PerHeadGpuPages:
    """Implement `GpuPages` for a per-head KV cache."""

    def __init__(
        self, model: Model, cache: PerHeadCache, retention: EvictionPolicy, max_model_len: int, send: Send
    ) -> None:
        self.name = f", per-head cache{backend_suffix(None if cache.format is None else cache.format.name)}"
        self.cache, self.retention, self.max_model_len = cache, retention, max_model_len
        self._send, self._module = send, model.network
        self._module.set_attn_implementation(NAME)
        self._compress = ChunkCompressor(*rope_functions(model.network, model.device))
        self._tables = Tables(cache, len(cache.tables) - 1, send)
        self._layers: dict[tuple[int, int], tuple[ClusteredHeadPages, int]] = {}

    def single(self, piece: ScheduledChunk) -> bool:
        return piece.count == 1 and piece.start >= per_head_state(piece.request).kept.stop

    def before(self, step: ScheduledBatch) -> None:
        self._tables.before(step)

    def after(self, step: ScheduledBatch) -> None:
        self._tables.after(step)

    def decoding(self, slots: Tensor, lengths: Tensor, network: FusedNetwork) -> Attend:
        from smelt.kernels.gpu.paged import DecodeMetadata, paged_decode

        metadata = DecodeMetadata(slots, lengths, self.cache.tables, network.arrived, self.max_model_len)

        def attend(mixed: Tensor, part: Attention) -> Tensor:
            pages, splits = self._layer(part.index, len(slots))
            return paged_decode(
                mixed, self.cache.keys, self.cache.values, metadata, network.rotation(part), part.scale,
                head_pages=pages, splits=splits, kv_quant=self.cache.format,
            )  # fmt: skip

        return attend

    def mixed(self, pieces: list[ScheduledChunk], slots: Tensor, positions: Tensor, network: FusedNetwork) -> Mixed:
        from smelt.kernels.gpu.paged import QueryTiles, paged_prefill, prefill_config
        from smelt.kernels.gpu.rope import rope_and_store_kv

        step = step_of(self.cache, pieces, torch.stack((slots, positions)), self._send)
        cache, kv_quant = self.cache, self.cache.format
        metadata = AttentionMetadata(step.bounds, step.lengths, cache.tables, positions, step.longest, step.counts)
        tiles = QueryTiles.of(step.counts, slots.device, prefill_config(metadata, cache.keys.shape[-1], kv_quant))

        def attend(mixed: Tensor, part: Attention) -> Tensor:
            head_pages, _ = self._layer(part.index, len(pieces))
            queries = rope_and_store_kv(
                mixed, positions, slots, network.rotation(part), cache.keys, cache.values, head_pages, kv_quant
            )
            output = paged_prefill(
                queries, cache.keys, cache.values, metadata, part.scale, tiles=tiles, head_pages=head_pages,
                slots=step.piece_slots, kv_quant=kv_quant,
            )  # fmt: skip
            # Scoring dequantizes keys, which undoes their Hadamard rotation, so the queries must be unrotated as well.
            self._compress(step, part.index, queries if kv_quant is None else kv_quant.unrotate(queries), part.scale)
            return output.flatten(1)

        def logits(ids: Tensor, wanted: Tensor) -> Tensor:
            return module_logits(self._module, per_head_attention(step, self._compress), ids, positions, wanted)

        return Mixed(attend, logits)

    def _layer(self, layer: int, requests: int) -> tuple[ClusteredHeadPages, int]:
        """Return a layer's head pages and its maximum splits per head, rounded up to a power of two; cached per
        power of two of requests."""
        from smelt.kernels.gpu.arch import num_sms
        from smelt.kernels.gpu.paged import BLOCK_N, num_splits
        from smelt.kernels.gpu.pages import ClusteredHeadPages

        requests = 1 << (requests - 1).bit_length()
        if (layer, requests) not in self._layers:
            cache = self.cache
            shares, sms = tuple(self.retention.head_splits[layer].tolist()), num_sms(cache.keys.device)
            max_parts = max(min(MOST_PARTS, self.max_model_len // (2 * BLOCK_N)), 1)
            uniform = (num_splits(requests, len(shares), self.max_model_len, sms),) * len(shares)
            counts = uniform if len(set(shares)) == 1 else parts_of(shares, requests, sms, max_parts)
            head_pages = ClusteredHeadPages(
                cache.tables, cache.shifts, cache.cluster[layer], cache.column[layer], cache.columns,
                torch.tensor(work_of(shares, counts), dtype=torch.int32, device=cache.keys.device),
            )  # fmt: skip
            self._layers[layer, requests] = head_pages, 1 << (max(counts) - 1).bit_length()
        return self._layers[layer, requests]
