"""Run steps on a per-head KV cache, eagerly or compiled on CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kvcache.rope import rope_functions
from smelt.models.model import Model
from smelt.progress import Progress
from smelt.runtime.cpu import CompiledNetwork, unsupported_reason
from smelt.serve.engine.adapters import Adapters, uses_adapters
from smelt.serve.engine.attention import ATTN_IMPLEMENTATION
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.per_head.cache import PerHeadCache
from smelt.serve.engine.per_head.compress import ChunkCompressor, per_head_attention
from smelt.serve.engine.per_head.step import PerHeadBatch, PerHeadTables, build_batch
from smelt.serve.engine.runner import InflightBatch, eager_logits, find_eos_token_ids, logits_indices
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk


class PerHeadRunner:
    """Implement `Runner` for clusters of heads that keep different numbers of tokens."""

    max_inflight_steps = 0

    def __init__(
        self, model: Model, cache: PerHeadCache, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int,
        compiled: bool = True, adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        self.network, self.device, self.adapters = model.network, model.device, adapters
        self.eos_token_ids = find_eos_token_ids(model)
        self.cache = cache
        self.network.set_attn_implementation(ATTN_IMPLEMENTATION)
        self._compress = ChunkCompressor(*rope_functions(model.network, model.device))
        self.compiled: CompiledNetwork | None = None
        self.kv_cache_dtype = None if cache.kv_quant is None else cache.kv_quant.name
        if compiled and unsupported_reason(model, self.kv_cache_dtype) is None:
            self.compiled = CompiledNetwork(model, cache, max_num_batched_tokens, max_num_seqs, max_model_len)
        self._tables = PerHeadTables(self.cache, self._to_device)

    @property
    def backend(self) -> str:
        """Return what computes a step without compression; prompt chunks always run eagerly."""
        base = "eager" if self.compiled is None else self.compiled.name
        return f"{base}, per-head cache{backend_suffix(self.kv_cache_dtype)}"

    def warmup(self, progress: Progress) -> None:
        """Do nothing: nothing is compiled on first use."""

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        self._tables.prepare(batch)
        ids, tokens = self._token_inputs(batch.chunks)
        logits = self._logits(ids, build_batch(self.cache, batch.chunks, tokens, self._to_device), batch.chunks)
        self._tables.finish(batch)
        return InflightBatch.from_logits(batch, logits, self.eos_token_ids)

    def _logits(
        self, ids: Tensor, batch: PerHeadBatch, chunks: list[ScheduledChunk]
    ) -> Tensor:  # [requests, vocabulary]
        with_adapters = self.adapters is not None and uses_adapters(chunks)
        rows = self._to_device(np.array(logits_indices(chunks), dtype=np.int64))
        if self.compiled is not None and not batch.eviction_chunks and not with_adapters:
            return self.compiled.logits(ids, batch.positions, rows, _attention_metadata(batch))
        with self.adapters.apply(chunks, self.device) if with_adapters else nullcontext():  # type: ignore[union-attr]
            return eager_logits(self.network, per_head_attention(batch, self._compress), ids, batch.positions, rows)

    def _token_inputs(self, chunks: list[ScheduledChunk]) -> tuple[Tensor, Tensor]:
        """Return ids [tokens], and slots and positions [2, tokens]."""
        ids = np.concatenate([chunk.request.tokens[chunk.start : chunk.start + chunk.count] for chunk in chunks])
        slots = np.repeat([chunk.request.slot for chunk in chunks], [chunk.count for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks])
        return self._to_device(ids.astype(np.int64)), self._to_device(np.stack([slots, positions]).astype(np.int64))

    def _to_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _attention_metadata(batch: PerHeadBatch) -> AttentionMetadata:
    return AttentionMetadata(
        cu_seqlens_q=batch.cu_seqlens_q, seq_lens=batch.seq_lens, block_tables=batch.cache.block_tables,
        slot_mapping=batch.positions, max_seq_len=batch.max_seq_len, query_lens=batch.query_lens,
        request_slots=batch.request_slots, seq_len_offsets=batch.cache.seq_len_offsets,
    )  # fmt: skip
