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
from smelt.runtime.cpu import CompiledNetwork, reason_against
from smelt.serve.engine.adapters import Adapters, uses_adapters
from smelt.serve.engine.attention import NAME
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.per_head.cache import PerHeadCache
from smelt.serve.engine.per_head.compress import ChunkCompressor, per_head_attention
from smelt.serve.engine.per_head.step import PerHeadBatch, Tables, step_of
from smelt.serve.engine.runner import InflightBatch, end_tokens, last_tokens, module_logits
from smelt.serve.engine.sampler import sample
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk


class PerHeadRunner:
    """Implement `Runner` for clusters of heads that keep different numbers of tokens."""

    max_inflight_steps = 0

    def __init__(
        self, model: Model, cache: PerHeadCache, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int,
        compiled: bool = True, adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        self.network, self.device, self.adapters = model.network, model.device, adapters
        self.eos_token_ids = end_tokens(model)
        self.cache = cache
        self.network.set_attn_implementation(NAME)
        self._compress = ChunkCompressor(*rope_functions(model.network, model.device))
        self.compiled: CompiledNetwork | None = None
        self.kind = None if cache.format is None else cache.format.name
        if compiled and reason_against(model, self.kind) is None:
            self.compiled = CompiledNetwork(model, cache, max_num_batched_tokens, max_num_seqs, max_model_len)
        self._tables = Tables(self.cache, max_num_seqs, self._sent)

    @property
    def backend(self) -> str:
        """Return what computes a step without compression; prompt chunks always run eagerly."""
        base = "eager" if self.compiled is None else self.compiled.name
        return f"{base}, per-head cache{backend_suffix(self.kind)}"

    def warmup(self) -> None:
        """Do nothing: nothing is compiled on first use."""

    @torch.inference_mode()
    def launch(self, step: ScheduledBatch) -> InflightBatch:
        self._tables.before(step)
        ids, tokens = self._tokens(step.pieces)
        logits = self._logits(ids, step_of(self.cache, step.pieces, tokens, self._sent), step.pieces)
        self._tables.after(step)
        requests = [chunk.request for chunk in step.pieces if chunk.samples_token]
        return InflightBatch(step, requests, sample(logits, requests, self.eos_token_ids) if requests else None)

    def _logits(
        self, ids: Tensor, step: PerHeadBatch, pieces: list[ScheduledChunk]
    ) -> Tensor:  # [requests, vocabulary]
        adapted = self.adapters is not None and uses_adapters(pieces)
        rows = self._sent(np.array(last_tokens(pieces), dtype=np.int64))
        if self.compiled is not None and not step.chunks and not adapted:
            return self.compiled.logits(ids, step.positions, rows, _pages(step))
        with self.adapters.applied(pieces, self.device) if adapted else nullcontext():  # type: ignore[union-attr]
            return module_logits(self.network, per_head_attention(step, self._compress), ids, step.positions, rows)

    def _tokens(self, pieces: list[ScheduledChunk]) -> tuple[Tensor, Tensor]:
        """Return ids [tokens], and slots and positions [2, tokens]."""
        ids = np.concatenate([chunk.request.tokens[chunk.start : chunk.start + chunk.count] for chunk in pieces])
        slots = np.repeat([chunk.request.slot for chunk in pieces], [chunk.count for chunk in pieces])
        positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.count) for chunk in pieces])
        return self._sent(ids.astype(np.int64)), self._sent(np.stack([slots, positions]).astype(np.int64))

    def _sent(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _pages(step: PerHeadBatch) -> AttentionMetadata:
    return AttentionMetadata(
        step.bounds, step.lengths, step.cache.tables, step.positions, step.longest, step.counts, step.piece_slots,
        step.cache.shifts,
    )  # fmt: skip
