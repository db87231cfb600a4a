"""Run a step of the network: fill its input buffers, write the KV cache and sample tokens.

Buffers are allocated once. A request's row of the block table is written when a block is added, not for every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.models.model import Model
from smelt.runtime.cpu import CompiledNetwork, reason_against
from smelt.serve.engine.adapters import Adapters, uses_adapters
from smelt.serve.engine.attention import NAME, Attend, PagedCache, attending, paged
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.request import Request
from smelt.serve.engine.sampler import SamplerOutput, sample
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk


@dataclass(frozen=True)
class InflightBatch:
    """A launched step, and the requests it samples tokens for."""

    step: ScheduledBatch
    giving: list[Request]
    drawn: SamplerOutput | None

    def tokens(self) -> list[int]:
        """Return one token for each of `giving`; wait until they are available."""
        return [] if self.drawn is None else list(self.drawn.tokens.tolist())


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
        kind: str | None = None,
    ) -> None:
        """`kind`: the KV cache dtype, see `PagedCache`."""
        self.network, self.block_size, self.adapters, self.kind = model.network, block_size, adapters, kind
        self.device, self.dtype = model.device, model.network.dtype
        self.eos_token_ids = end_tokens(model)
        self.cache = PagedCache.empty(model.anatomy, num_blocks, block_size, self.dtype, self.device, kind)
        self.network.set_attn_implementation(NAME)
        self.compiled: CompiledNetwork | None = None
        if compiled and reason_against(model, kind) is None:
            self.compiled = CompiledNetwork(model, self.cache, max_num_batched_tokens, max_num_seqs, max_model_len)
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._written: list[tuple[list[int], int]] = [
            ([], 0)
        ] * max_num_seqs  # per row: blocks, and how many are written
        self._ids = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._places = np.zeros(max_num_batched_tokens, dtype=np.int64)

    @property
    def backend(self) -> str:
        """Return what computes a step."""
        return f"{'eager' if self.compiled is None else self.compiled.name}{backend_suffix(self.kind)}"

    def warmup(self) -> None:
        """Do nothing: nothing is compiled on first use."""

    @torch.inference_mode()
    def launch(self, step: ScheduledBatch) -> InflightBatch:
        count = self._fill(step.pieces)
        ids, positions = (self._on_device(buffer[:count]) for buffer in (self._ids, self._positions))
        rows, pages = (
            torch.tensor(last_tokens(step.pieces), dtype=torch.int64, device=self.device),
            self._pages(step.pieces, count),
        )
        requests = [chunk.request for chunk in step.pieces if chunk.samples_token]
        if self.adapters is not None and uses_adapters(step.pieces):
            with self.adapters.applied(step.pieces, self.device):
                logits = module_logits(self.network, self._attend(pages), ids, positions, rows)
        else:
            logits = self._logits(ids, positions, rows, pages)
        return InflightBatch(step, requests, sample(logits, requests, self.eos_token_ids) if requests else None)

    def _logits(
        self, ids: Tensor, positions: Tensor, rows: Tensor, pages: AttentionMetadata
    ) -> Tensor:  # [rows, vocabulary]
        if self.compiled is not None:
            return self.compiled.logits(ids, positions, rows, pages)
        return module_logits(self.network, self._attend(pages), ids, positions, rows)

    def _attend(self, pages: AttentionMetadata) -> Attend:
        return paged(self.cache, pages)

    def _fill(self, pieces: list[ScheduledChunk]) -> int:
        """Fill in the ids, positions and slots of a step, chunk after chunk; return the number of tokens."""
        offset = 0
        for chunk in pieces:
            request, start, stop = chunk.request, chunk.start, chunk.start + chunk.count
            span = slice(offset, offset + chunk.count)
            self._write_table(request)
            position = self._place(chunk)
            positions = np.arange(position, position + chunk.count)
            blocks = self._tables[request.slot, positions // self.block_size]
            self._ids[span] = request.tokens[start:stop]
            self._positions[span] = positions
            self._places[span] = blocks.astype(np.int64) * self.block_size + positions % self.block_size
            offset += chunk.count
        return offset

    def _place(self, piece: ScheduledChunk) -> int:
        """Return the position of a chunk's first token in its request's KV cache."""
        return piece.start

    def _write_table(self, request: Request) -> None:
        blocks, count = self._written[request.slot]
        if blocks is not request.blocks:  # another request's, or its own before a preemption
            count = 0
        if count < len(request.blocks):
            self._tables[request.slot, count : len(request.blocks)] = request.blocks[count:]
            self._written[request.slot] = (request.blocks, len(request.blocks))

    def _pages(self, pieces: list[ScheduledChunk], count: int) -> AttentionMetadata:
        lengths = np.array([self._place(chunk) + chunk.count for chunk in pieces], dtype=np.int32)
        counts = [chunk.count for chunk in pieces]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = [chunk.request.slot for chunk in pieces]
        max_seq_len = int(lengths.max())
        tables = self._tables[rows, : -(-max_seq_len // self.block_size)]
        return AttentionMetadata(
            cu_seqlens_q=self._on_device(starts),
            seq_lens=self._on_device(lengths),
            block_tables=self._on_device(tables),
            slot_mapping=self._on_device(self._places[:count]),
            max_seq_len=max_seq_len,
            query_lens=counts,
        )

    def _on_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def module_logits(
    network: PreTrainedModel, attend: Attend, ids: Tensor, positions: Tensor, rows: Tensor
) -> Tensor:  # [rows, vocabulary]
    """Run the network eagerly on all tokens of a step as one sequence."""
    with attending(attend):
        output = network(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
    logits: Tensor = output.logits[0]
    return logits


def last_tokens(pieces: list[ScheduledChunk]) -> list[int]:
    """Return the rows of a step's tokens that need logits."""
    rows, offset = [], 0
    for chunk in pieces:
        offset += chunk.count
        if chunk.samples_token:
            rows.append(offset - 1)
    return rows


def end_tokens(model: Model) -> tuple[int, ...]:
    """Return the model's EOS token ids."""
    eos = getattr(model.network.generation_config, "eos_token_id", None)
    if eos is None and model.tokenizer is not None:
        eos = model.tokenizer.eos_token_id
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
