"""Run a step of the network: fill its input buffers, write the KV cache and sample tokens.

Buffers are allocated once. A request's row of the block table is written when a block is added, not for every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.models.model import Model
from smelt.progress import Progress
from smelt.runtime.cpu import CompiledNetwork, unsupported_reason
from smelt.serve.engine.adapters import Adapters, uses_adapters
from smelt.serve.engine.attention import ATTN_IMPLEMENTATION, AttentionFn, PagedCache, paged_attention_fn, use_attention
from smelt.serve.engine.block_table import BlockTables
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.prompt_logprobs import PromptChunkLogprobs, compute_prompt_logprobs, prompt_logits_indices
from smelt.serve.engine.request import Request
from smelt.serve.engine.sampler import SamplerOutput, sample
from smelt.serve.engine.scheduler import MAX_PROMPT_LOGITS, ScheduledBatch, ScheduledChunk


@dataclass(frozen=True)
class InflightBatch:
    """A launched batch, and the requests it samples tokens for."""

    batch: ScheduledBatch
    requests: list[Request]
    sampler_output: SamplerOutput | None
    prompt_logprobs: list[PromptChunkLogprobs] = field(default_factory=list)

    @classmethod
    def from_logits(cls, batch: ScheduledBatch, logits: Tensor, eos_token_ids: tuple[int, ...]) -> InflightBatch:
        """Sample tokens from the logits of `logits_indices`, and read those of prompts that follow them."""
        requests = sampled_requests(batch.chunks)
        output = sample(logits[: len(requests)], requests, eos_token_ids) if requests else None
        prompt_logits = logits[len(requests) :]
        return cls(batch, requests, output, compute_prompt_logprobs(batch.chunks, lambda rows: prompt_logits[rows]))

    def tokens(self) -> list[int]:
        """Return one token for each of `requests`; wait until they are available."""
        return [] if self.sampler_output is None else list(self.sampler_output.tokens.tolist())


class ModelRunner:
    """Run the network with attention over a paged KV cache: eagerly, or on CPU as a compiled program if possible."""

    max_inflight_steps = 0  # steps launched before the previous one is read

    def __init__(
        self,
        model: Model,
        *,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        compiled: bool = True,
        adapters: Adapters | None = None,
        kv_cache_dtype: str | None = None,
    ) -> None:
        """Allocate the cache and the input buffers; `kv_cache_dtype` None is the model's own."""
        self.network, self.block_size, self.adapters = model.network, block_size, adapters
        self.kv_cache_dtype = kv_cache_dtype
        self.device, self.dtype = model.device, model.network.dtype
        self.eos_token_ids = find_eos_token_ids(model)
        self.cache = PagedCache.empty(model.anatomy, num_blocks, block_size, self.dtype, self.device, kv_cache_dtype)
        self.network.set_attn_implementation(ATTN_IMPLEMENTATION)
        self.compiled: CompiledNetwork | None = None
        if compiled and unsupported_reason(model, kv_cache_dtype) is None:
            max_num_logits = min(max_num_seqs + MAX_PROMPT_LOGITS, max_num_batched_tokens)
            self.compiled = CompiledNetwork(model, self.cache, max_num_batched_tokens, max_num_logits, max_model_len)
        tables = torch.zeros(max_num_seqs, -(-max_model_len // block_size), dtype=torch.int32)  # on the host
        self._block_tables = BlockTables(tables, torch.from_numpy)
        self._tables: np.ndarray[Any, Any] = tables.numpy()  # the same memory
        self._input_ids = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._slot_mapping = np.zeros(max_num_batched_tokens, dtype=np.int64)

    @property
    def backend(self) -> str:
        """Return what computes a step."""
        return f"{'eager' if self.compiled is None else self.compiled.name}{backend_suffix(self.kv_cache_dtype)}"

    def warmup(self, progress: Progress) -> None:
        """Do nothing: nothing is compiled on first use."""

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        count = self._fill_inputs(batch.chunks)
        ids, positions = (self._to_device(buffer[:count]) for buffer in (self._input_ids, self._positions))
        rows = torch.tensor(logits_indices(batch.chunks), dtype=torch.int64, device=self.device)
        metadata = self._build_metadata(batch.chunks, count)
        if self.adapters is not None and uses_adapters(batch.chunks):
            with self.adapters.apply(batch.chunks, self.device):
                logits = eager_logits(self.network, self._attention_fn(metadata), ids, positions, rows)
        else:
            logits = self._logits(ids, positions, rows, metadata)
        return InflightBatch.from_logits(batch, logits, self.eos_token_ids)

    def _logits(
        self, ids: Tensor, positions: Tensor, rows: Tensor, metadata: AttentionMetadata
    ) -> Tensor:  # [rows, vocabulary]
        if self.compiled is not None:
            return self.compiled.logits(ids, positions, rows, metadata)
        return eager_logits(self.network, self._attention_fn(metadata), ids, positions, rows)

    def _attention_fn(self, metadata: AttentionMetadata) -> AttentionFn:
        return paged_attention_fn(self.cache, metadata)

    def _fill_inputs(self, chunks: Sequence[ScheduledChunk]) -> int:
        """Fill in the ids, positions and slots of a step, chunk after chunk; return the number of tokens."""
        self._block_tables.update(chunks)
        offset = 0
        for chunk in chunks:
            request, start, stop = chunk.request, chunk.start, chunk.start + chunk.count
            span = slice(offset, offset + chunk.count)
            first = self._first_position(chunk)
            positions = np.arange(first, first + chunk.count)
            blocks = self._tables[request.slot, positions // self.block_size]
            self._input_ids[span] = request.tokens[start:stop]
            self._positions[span] = positions
            self._slot_mapping[span] = blocks.astype(np.int64) * self.block_size + positions % self.block_size
            offset += chunk.count
        return offset

    def _first_position(self, chunk: ScheduledChunk) -> int:
        """Return the position of a chunk's first token in its request's KV cache."""
        return chunk.start

    def _build_metadata(self, chunks: Sequence[ScheduledChunk], count: int) -> AttentionMetadata:
        seq_lens = np.array([self._first_position(chunk) + chunk.count for chunk in chunks], dtype=np.int32)
        query_lens = [chunk.count for chunk in chunks]
        rows = [chunk.request.slot for chunk in chunks]
        max_seq_len = int(seq_lens.max())
        tables = self._tables[rows, : -(-max_seq_len // self.block_size)]
        return AttentionMetadata(
            cu_seqlens_q=self._to_device(cumulative_lens(query_lens)),
            seq_lens=self._to_device(seq_lens),
            block_tables=self._to_device(tables),
            slot_mapping=self._to_device(self._slot_mapping[:count]),
            max_seq_len=max_seq_len,
            query_lens=query_lens,
        )

    def _to_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def eager_logits(
    network: PreTrainedModel, attention_fn: AttentionFn, ids: Tensor, positions: Tensor, rows: Tensor
) -> Tensor:  # [rows, vocabulary]
    """Run the network eagerly on all tokens of a step as one sequence; return the logits of `rows`."""
    with use_attention(attention_fn):
        output = network(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
    logits: Tensor = output.logits[0]
    return logits


def sampled_requests(chunks: Sequence[ScheduledChunk]) -> list[Request]:
    """Return the requests that a step samples a token for."""
    return [chunk.request for chunk in chunks if chunk.samples_token]


def logits_indices(chunks: Sequence[ScheduledChunk]) -> list[int]:
    """Return the rows of a step's tokens that need logits: those that sample a token, then those of prompts."""
    return [*sampling_indices(chunks), *prompt_logits_indices(chunks)]


def sampling_indices(chunks: Sequence[ScheduledChunk]) -> list[int]:
    """Return the rows of a step's tokens that the next token is sampled from."""
    rows, offset = [], 0
    for chunk in chunks:
        offset += chunk.count
        if chunk.samples_token:
            rows.append(offset - 1)
    return rows


def cumulative_lens(query_lens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return where the tokens of each chunk start, and the end of the last: [chunks + 1]."""
    return np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)


def find_eos_token_ids(model: Model) -> tuple[int, ...]:
    """Return the model's EOS token ids."""
    eos = getattr(model.network.generation_config, "eos_token_id", None)
    if eos is None and model.tokenizer is not None:
        eos = model.tokenizer.eos_token_id
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
