"""A step of the network: the buffers it reads, the pages it writes, and the tokens it gives.

Buffers are made once. A request's row of the block table is written when a block is added to it, not at every token.
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
    """A step under way, and whose tokens it gives."""

    step: ScheduledBatch
    giving: list[Request]
    drawn: SamplerOutput | None

    def tokens(self) -> list[int]:
        """One for each of `giving`; waits until they are there."""
        return [] if self.drawn is None else list(self.drawn.tokens.tolist())


class ModelRunner:
    """Runs the network as it is, its attention on a paged cache; on a processor, as a program where there is one."""

    max_inflight_steps = 0  # steps that are launched before the one before them is read

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
        """`kind`: of the pages' rows, see `PagedCache`."""
        self.network, self.block_size, self.adapters, self.kind = model.network, block_size, adapters, kind
        self.device, self.dtype = model.device, model.network.dtype
        self.eos_token_ids = end_tokens(model)
        self.cache = PagedCache.empty(model.anatomy, num_blocks, block_size, self.dtype, self.device, kind)
        self.network.set_attn_implementation(NAME)
        self.compiled: CompiledNetwork | None = None
        if compiled and reason_against(model, kind) is None:
            self.compiled = CompiledNetwork(model, self.cache, max_num_batched_tokens, max_num_seqs, max_model_len)
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self._written: list[tuple[list[int], int]] = [([], 0)] * max_num_seqs  # blocks of a row, and how many of them
        self._ids = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._positions = np.zeros(max_num_batched_tokens, dtype=np.int64)
        self._places = np.zeros(max_num_batched_tokens, dtype=np.int64)

    @property
    def backend(self) -> str:
        """What computes a step."""
        return f"{'eager' if self.compiled is None else self.compiled.name}{backend_suffix(self.kind)}"

    def warmup(self) -> None:
        """Nothing is left for the first use."""

    @torch.inference_mode()
    def launch(self, step: ScheduledBatch) -> InflightBatch:
        count = self._fill(step.pieces)
        ids, positions = (self._on_device(buffer[:count]) for buffer in (self._ids, self._positions))
        rows, pages = (
            torch.tensor(last_tokens(step.pieces), dtype=torch.int64, device=self.device),
            self._pages(step.pieces, count),
        )
        giving = [piece.request for piece in step.pieces if piece.samples_token]
        if self.adapters is not None and uses_adapters(step.pieces):
            with self.adapters.applied(step.pieces, self.device):
                logits = module_logits(self.network, self._attend(pages), ids, positions, rows)
        else:
            logits = self._logits(ids, positions, rows, pages)
        return InflightBatch(step, giving, sample(logits, giving, self.eos_token_ids) if giving else None)

    def _logits(
        self, ids: Tensor, positions: Tensor, rows: Tensor, pages: AttentionMetadata
    ) -> Tensor:  # [rows, vocabulary]
        if self.compiled is not None:
            return self.compiled.logits(ids, positions, rows, pages)
        return module_logits(self.network, self._attend(pages), ids, positions, rows)

    def _attend(self, pages: AttentionMetadata) -> Attend:
        return paged(self.cache, pages)

    def _fill(self, pieces: list[ScheduledChunk]) -> int:
        """Tokens, positions and places of a step, one piece behind the other."""
        at = 0
        for piece in pieces:
            request, start, stop = piece.request, piece.start, piece.start + piece.count
            here = slice(at, at + piece.count)
            self._write_table(request)
            place = self._place(piece)
            positions = np.arange(place, place + piece.count)
            blocks = self._tables[request.slot, positions // self.block_size]
            self._ids[here] = request.tokens[start:stop]
            self._positions[here] = positions
            self._places[here] = blocks.astype(np.int64) * self.block_size + positions % self.block_size
            at += piece.count
        return at

    def _place(self, piece: ScheduledChunk) -> int:
        """Where the first token of a piece lies among those of its request, and so its position."""
        return piece.start

    def _write_table(self, request: Request) -> None:
        held, count = self._written[request.slot]
        if held is not request.blocks:  # another request's, or those that it had before it was preempted
            count = 0
        if count < len(request.blocks):
            self._tables[request.slot, count : len(request.blocks)] = request.blocks[count:]
            self._written[request.slot] = (request.blocks, len(request.blocks))

    def _pages(self, pieces: list[ScheduledChunk], count: int) -> AttentionMetadata:
        lengths = np.array([self._place(piece) + piece.count for piece in pieces], dtype=np.int32)
        counts = [piece.count for piece in pieces]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = [piece.request.slot for piece in pieces]
        longest = int(lengths.max())
        tables = self._tables[rows, : -(-longest // self.block_size)]
        return AttentionMetadata(
            cu_seqlens_q=self._on_device(starts),
            seq_lens=self._on_device(lengths),
            block_tables=self._on_device(tables),
            slot_mapping=self._on_device(self._places[:count]),
            max_seq_len=longest,
            query_lens=counts,
        )

    def _on_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def module_logits(
    network: PreTrainedModel, attend: Attend, ids: Tensor, positions: Tensor, rows: Tensor
) -> Tensor:  # [rows, vocabulary]
    """By the network as it is, all tokens of a step behind one another."""
    with attending(attend):
        found = network(input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
    logits: Tensor = found.logits[0]
    return logits


def last_tokens(pieces: list[ScheduledChunk]) -> list[int]:
    """Where the tokens stand whose logits are wanted, in a step with all pieces behind one another."""
    places, at = [], 0
    for piece in pieces:
        at += piece.count
        if piece.samples_token:
            places.append(at - 1)
    return places


def end_tokens(model: Model) -> tuple[int, ...]:
    """The model's own ends of text."""
    found = getattr(model.network.generation_config, "eos_token_id", None)
    if found is None and model.tokenizer is not None:
        found = model.tokenizer.eos_token_id
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)
