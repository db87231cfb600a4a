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
from smelt.serve.engine.attention import Attend, attending, paged
from smelt.serve.engine.bounded.cache_manager import bounded_state
from smelt.serve.engine.bounded.pages import BoundedCachePages
from smelt.serve.engine.request import Request
from smelt.serve.engine.runner import InflightBatch, ModelRunner, last_tokens
from smelt.serve.engine.sampler import sample
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk


class BoundedRunner(ModelRunner):
    """Implement `Runner` where positions are slots of a bounded cache."""

    def __init__(
        self, model: Model, distiller: InfiniPotCompressor, pots: BoundedCacheSize, *, num_blocks: int, block_size: int,
        max_num_batched_tokens: int, max_num_seqs: int, compiled: bool = True, adapters: Adapters | None = None,
        kind: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=pots.capacity,
            compiled=compiled,
            adapters=adapters,
            kind=kind,
        )
        self.pots, self.pages, self.distiller = pots, BoundedCachePages(self.cache, num_blocks, self.dtype), distiller
        self.cooked = 0  # compressions so far

    @property
    def backend(self) -> str:
        return f"{super().backend}, KV cache of {self.pots.capacity} tokens"

    @torch.inference_mode()
    def launch(self, step: ScheduledBatch) -> InflightBatch:
        self.pages.copy(step.copies)
        for chunk in step.pieces:
            if self.pots.compresses_at(chunk.start):
                self._cook_down(chunk.request)
        count = self._fill(step.pieces)
        pages = self._pages(step.pieces, count)
        self.pages.number(pages.slot_mapping, self._numbers(step.pieces))
        requests = [chunk.request for chunk in step.pieces if chunk.samples_token]
        logits, known_novelty = self._read(step.pieces, pages, count)
        output = sample(logits, requests, self.eos_token_ids) if requests else None
        sampled_novelty = (
            known_novelty[:0] if output is None else F.cross_entropy(logits.float(), output.tokens, reduction="none")
        )
        _note(step.pieces, known_novelty, sampled_novelty)
        return InflightBatch(step, requests, output)

    def _place(self, piece: ScheduledChunk) -> int:
        return self.pots.slot(piece.start)

    def _read(self, pieces: list[ScheduledChunk], pages: AttentionMetadata, count: int) -> tuple[Tensor, Tensor]:
        """Return logits [requests, vocabulary], and the novelty of the known tokens that follow those of this step,
        chunk after chunk."""
        ids, positions = (self._on_device(buffer[:count]) for buffer in (self._ids, self._positions))
        rows = torch.tensor(last_tokens(pieces), dtype=torch.int64, device=self.device)
        if self.compiled is not None and len(rows) == count and not self._adapted(pieces):
            logits = self.compiled.logits(ids, positions, rows, pages)
            return logits, logits.new_zeros(0)
        with self._adapters(pieces):
            states = self._states(self._attend(pages), ids, positions)
        head: Any = self.network.get_output_embeddings()
        known = torch.ones(count, dtype=torch.bool, device=self.device).index_fill_(0, rows, False)
        return head(states[rows]), token_novelty(states[known], self._following(pieces), head)

    def _states(self, attend: Attend, ids: Tensor, positions: Tensor) -> Tensor:  # [tokens, hidden size]
        with attending(attend):
            output: Any = self.network.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        states: Tensor = output.last_hidden_state[0]
        return states

    def _cook_down(self, request: Request) -> None:
        prompt, num_text = self.distiller.prompt, self.pots.max_text_tokens
        self._write_table(request)
        positions = torch.arange(num_text + len(prompt))
        table = torch.from_numpy(self._tables[request.slot])
        rows = (table[positions // self.block_size].long() * self.block_size + positions % self.block_size).to(
            self.device
        )
        attention: dict[int, Tensor] = {}
        paged_attend = paged(self.cache, self._behind(request, rows[num_text:]))

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, _: int | None) -> Tensor:
            output = paged_attend(layer, queries, keys, values, scale, None)
            cached_keys = self.pages.keys(layer, rows)[None]
            attention[layer] = self.distiller.attention(queries.transpose(0, 1)[None], cached_keys, scale)
            return output

        with self._adapters([ScheduledChunk(request, num_text, len(prompt), False)]):
            self._states(attend, prompt, positions[num_text:].to(self.device))
        keep = self.pots.keep
        novel = bounded_state(request).ledger.keep_top(self.distiller.method.num_novel(keep))
        self.pages.keep(rows[:num_text], attention, novel, keep, self.distiller)
        self.cooked += 1

    def _behind(self, request: Request, places: Tensor) -> AttentionMetadata:
        """Return the attention metadata of the catalyst prompt after a full cache, in these slots."""
        new, length = len(places), self.pots.max_text_tokens + len(places)

        def sent(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        table = self._on_device(self._tables[[request.slot], : -(-length // self.block_size)])
        return AttentionMetadata(sent([0, new]), sent([length]), table, places, length, [new])

    def _numbers(self, pieces: Sequence[ScheduledChunk]) -> Tensor:  # [tokens]
        return torch.cat([torch.arange(chunk.start, chunk.start + chunk.count) for chunk in pieces]).to(self.device)

    def _following(self, pieces: Sequence[ScheduledChunk]) -> Tensor:
        """Return the known successors of a step's tokens; the last token of a chunk that samples has none."""
        tokens: list[int] = []
        for chunk in pieces:
            tokens += chunk.request.tokens[chunk.start + 1 : chunk.start + chunk.count + 1]
        return torch.tensor(tokens, dtype=torch.int64, device=self.device)

    def _adapted(self, pieces: Sequence[ScheduledChunk]) -> bool:
        return self.adapters is not None and uses_adapters(pieces)

    def _adapters(self, pieces: Sequence[ScheduledChunk]) -> AbstractContextManager[None]:
        if self.adapters is None or not uses_adapters(pieces):
            return nullcontext()
        return self.adapters.applied(pieces, self.device)


def _note(pieces: Sequence[ScheduledChunk], read: Tensor, given: Tensor) -> None:
    """Record the novelty of known tokens (`read`) and of sampled tokens (`given`), both in order."""
    for chunk in pieces:
        num_known = chunk.count - chunk.samples_token
        bounded_state(chunk.request).append(chunk.start, torch.cat((read[:num_known], given[: chunk.samples_token])))
        read, given = read[num_known:], given[int(chunk.samples_token) :]
