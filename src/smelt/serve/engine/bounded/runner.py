"""Run steps on bounded KV caches. A full cache is compressed before its next token: the catalyst prompt is appended and
computed on its own, so that what is kept depends on this cache alone, then removed (InfiniPot, arXiv 2410.01518).

Prompt chunks run eagerly: the novelty of each token comes from the hidden states. A pure decode step needs only logits,
so it can run as a compiled program on CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.kvcache.streaming.config import BoundedCacheSize
from smelt.kvcache.streaming.infinipot import InfiniPotCompressor
from smelt.kvcache.streaming.novelty import token_novelty
from smelt.models.model import Model
from smelt.serve.engine.adapters import Adapters, uses_adapters
from smelt.serve.engine.attention import AttentionFn, paged_attention_fn, use_attention
from smelt.serve.engine.bounded.cache_manager import bounded_state
from smelt.serve.engine.bounded.pages import BoundedCachePages
from smelt.serve.engine.request import Request
from smelt.serve.engine.runner import InflightBatch, ModelRunner, logits_indices, sampled_requests
from smelt.serve.engine.sampler import sample
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk


class BoundedRunner(ModelRunner):
    """Implement `Runner` where positions are slots of a bounded cache."""

    def __init__(
        self, model: Model, compressor: InfiniPotCompressor, cache_size: BoundedCacheSize, *, num_blocks: int,
        block_size: int, max_num_batched_tokens: int, max_num_seqs: int, compiled: bool = True,
        adapters: Adapters | None = None, kv_cache_dtype: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=cache_size.capacity,
            compiled=compiled,
            adapters=adapters,
            kv_cache_dtype=kv_cache_dtype,
        )
        self.cache_size, self.compressor = cache_size, compressor
        self.pages = BoundedCachePages(self.cache, num_blocks, self.dtype)
        self.num_compressions = 0

    @property
    def backend(self) -> str:
        return f"{super().backend}, KV cache of {self.cache_size.capacity} tokens"

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        self.pages.copy(batch.copies)
        for chunk in batch.chunks:
            if self.cache_size.compresses_at(chunk.start):
                self._compress(chunk.request)
        count = self._fill_inputs(batch.chunks)
        metadata = self._build_metadata(batch.chunks, count)
        self.pages.record(metadata.slot_mapping, self._token_indices(batch.chunks))
        requests = sampled_requests(batch.chunks)
        logits, known_novelty = self._forward(batch.chunks, metadata, count)
        output = sample(logits, requests, self.eos_token_ids) if requests else None
        sampled_novelty = (
            known_novelty[:0] if output is None else F.cross_entropy(logits.float(), output.tokens, reduction="none")
        )
        _record_novelty(batch.chunks, known_novelty, sampled_novelty)
        return InflightBatch(batch, requests, output)

    def _first_position(self, chunk: ScheduledChunk) -> int:
        return self.cache_size.slot(chunk.start)

    def _forward(self, chunks: list[ScheduledChunk], metadata: AttentionMetadata, count: int) -> tuple[Tensor, Tensor]:
        """Return logits [requests, vocabulary], and the novelty of the known tokens that follow those of this step,
        chunk after chunk."""
        ids, positions = (self._to_device(buffer[:count]) for buffer in (self._input_ids, self._positions))
        rows = torch.tensor(logits_indices(chunks), dtype=torch.int64, device=self.device)
        if self.compiled is not None and len(rows) == count and not self._uses_adapters(chunks):
            logits = self.compiled.logits(ids, positions, rows, metadata)
            return logits, logits.new_zeros(0)
        with self._adapter_context(chunks):
            states = self._hidden_states(self._attention_fn(metadata), ids, positions)
        head: Any = self.network.get_output_embeddings()
        known = torch.ones(count, dtype=torch.bool, device=self.device).index_fill_(0, rows, False)
        return head(states[rows]), token_novelty(states[known], self._next_tokens(chunks), head)

    def _hidden_states(self, attention_fn: AttentionFn, ids: Tensor, positions: Tensor) -> Tensor:
        """Run the network without its LM head; return [tokens, hidden size]."""
        with use_attention(attention_fn):
            output: Any = self.network.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        states: Tensor = output.last_hidden_state[0]
        return states

    def _compress(self, request: Request) -> None:
        """Compress the full cache of a request in place."""
        prompt, num_text = self.compressor.prompt, self.cache_size.max_text_tokens
        self._block_tables.stage_new_blocks(request)
        self._block_tables.commit()
        positions = torch.arange(num_text + len(prompt))
        table = self._block_tables.tables[request.slot]
        rows = (table[positions // self.block_size].long() * self.block_size + positions % self.block_size).to(
            self.device
        )
        attention: dict[int, Tensor] = {}
        paged_attend = paged_attention_fn(self.cache, self._catalyst_metadata(request, rows[num_text:]))

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, _: int | None) -> Tensor:
            output = paged_attend(layer, queries, keys, values, scale, None)
            cached_keys = self.pages.keys(layer, rows)[None]
            attention[layer] = self.compressor.attention(queries.transpose(0, 1)[None], cached_keys, scale)
            return output

        with self._adapter_context([ScheduledChunk(request, num_text, len(prompt), False)]):
            self._hidden_states(attend, prompt, positions[num_text:].to(self.device))
        keep = self.cache_size.keep
        novel = bounded_state(request).novelty.keep_top(self.compressor.method.num_novel(keep))
        self.pages.keep(rows[:num_text], attention, novel, keep, self.compressor)
        self.num_compressions += 1

    def _catalyst_metadata(self, request: Request, slot_mapping: Tensor) -> AttentionMetadata:
        """Return the attention metadata of the catalyst prompt behind a full cache."""
        prompt_len = len(slot_mapping)
        seq_len = self.cache_size.max_text_tokens + prompt_len

        def to_device(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        table = self._to_device(self._tables[[request.slot], : -(-seq_len // self.block_size)])
        return AttentionMetadata(
            to_device([0, prompt_len]), to_device([seq_len]), table, slot_mapping, seq_len, [prompt_len]
        )

    def _token_indices(self, chunks: Sequence[ScheduledChunk]) -> Tensor:  # [tokens]
        return torch.cat([torch.arange(chunk.start, chunk.start + chunk.count) for chunk in chunks]).to(self.device)

    def _next_tokens(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Return the known successors of a step's tokens; the last token of a chunk that samples has none."""
        tokens: list[int] = []
        for chunk in chunks:
            tokens += chunk.request.tokens[chunk.start + 1 : chunk.start + chunk.count + 1]
        return torch.tensor(tokens, dtype=torch.int64, device=self.device)

    def _uses_adapters(self, chunks: Sequence[ScheduledChunk]) -> bool:
        return self.adapters is not None and uses_adapters(chunks)

    def _adapter_context(self, chunks: Sequence[ScheduledChunk]) -> AbstractContextManager[None]:
        if self.adapters is None or not uses_adapters(chunks):
            return nullcontext()
        return self.adapters.apply(chunks, self.device)


def _record_novelty(chunks: Sequence[ScheduledChunk], known: Tensor, sampled: Tensor) -> None:
    """Record the novelty of known tokens and of sampled tokens, both in order."""
    for chunk in chunks:
        num_known = chunk.count - chunk.samples_token
        bounded_state(chunk.request).append(chunk.start, torch.cat((known[:num_known], sampled[: chunk.samples_token])))
        known, sampled = known[num_known:], sampled[int(chunk.samples_token) :]
