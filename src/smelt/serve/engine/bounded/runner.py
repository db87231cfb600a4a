"""Steps on pots. A pot that is full is cooked down before its next token is read: the catalyst prompt is put behind it
and read by itself, so that what stays depends on this pot alone, and is taken away again (InfiniPot, arXiv 2410.01518).

Chunks of prompts run through the module, whose hidden states tell how novel each token is. A step in which every
request gets its next token needs only the logits, so that it can run as a program on a processor.
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
    """The runner's contract, where positions are places in a pot."""

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
        self.cooked = 0  # pots that were cooked down, so far

    @property
    def backend(self) -> str:
        return f"{super().backend}, KV cache of {self.pots.capacity} tokens"

    @torch.inference_mode()
    def launch(self, step: ScheduledBatch) -> InflightBatch:
        self.pages.copy(step.copies)
        for piece in step.pieces:
            if self.pots.compresses_at(piece.start):
                self._cook_down(piece.request)
        count = self._fill(step.pieces)
        pages = self._pages(step.pieces, count)
        self.pages.number(pages.slot_mapping, self._numbers(step.pieces))
        giving = [piece.request for piece in step.pieces if piece.samples_token]
        logits, read = self._read(step.pieces, pages, count)
        drawn = sample(logits, giving, self.eos_token_ids) if giving else None
        given = read[:0] if drawn is None else F.cross_entropy(logits.float(), drawn.tokens, reduction="none")
        _note(step.pieces, read, given)
        return InflightBatch(step, giving, drawn)

    def _place(self, piece: ScheduledChunk) -> int:
        return self.pots.slot(piece.start)

    def _read(self, pieces: list[ScheduledChunk], pages: AttentionMetadata, count: int) -> tuple[Tensor, Tensor]:
        """Logits [giving, vocabulary], and how novel the tokens are that follow those of this step and are known, one
        piece behind the other."""
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

    def _states(self, attend: Attend, ids: Tensor, positions: Tensor) -> Tensor:  # [tokens, width]
        with attending(attend):
            found: Any = self.network.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        states: Tensor = found.last_hidden_state[0]
        return states

    def _cook_down(self, request: Request) -> None:
        prompt, full = self.distiller.prompt, self.pots.max_text_tokens
        self._write_table(request)
        every = torch.arange(full + len(prompt))
        table = torch.from_numpy(self._tables[request.slot])
        rows = (table[every // self.block_size].long() * self.block_size + every % self.block_size).to(self.device)
        attention: dict[int, Tensor] = {}
        plain = paged(self.cache, self._behind(request, rows[full:]))

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, _: int | None) -> Tensor:
            found = plain(layer, queries, keys, values, scale, None)
            held = self.pages.keys(layer, rows)[None]
            attention[layer] = self.distiller.attention(queries.transpose(0, 1)[None], held, scale)
            return found

        with self._adapters([ScheduledChunk(request, full, len(prompt), False)]):
            self._states(attend, prompt, every[full:].to(self.device))
        keep = self.pots.keep
        novel = bounded_state(request).ledger.keep_top(self.distiller.method.num_novel(keep))
        self.pages.keep(rows[:full], attention, novel, keep, self.distiller)
        self.cooked += 1

    def _behind(self, request: Request, places: Tensor) -> AttentionMetadata:
        """The catalyst prompt behind a full pot, at these places."""
        new, length = len(places), self.pots.max_text_tokens + len(places)

        def sent(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        table = self._on_device(self._tables[[request.slot], : -(-length // self.block_size)])
        return AttentionMetadata(sent([0, new]), sent([length]), table, places, length, [new])

    def _numbers(self, pieces: Sequence[ScheduledChunk]) -> Tensor:  # [tokens]
        return torch.cat([torch.arange(piece.start, piece.start + piece.count) for piece in pieces]).to(self.device)

    def _following(self, pieces: Sequence[ScheduledChunk]) -> Tensor:
        """The tokens that are known to come after those of a step: a piece that gives ends with the last one."""
        found: list[int] = []
        for piece in pieces:
            found += piece.request.tokens[piece.start + 1 : piece.start + piece.count + 1]
        return torch.tensor(found, dtype=torch.int64, device=self.device)

    def _adapted(self, pieces: Sequence[ScheduledChunk]) -> bool:
        return self.adapters is not None and uses_adapters(pieces)

    def _adapters(self, pieces: Sequence[ScheduledChunk]) -> AbstractContextManager[None]:
        if self.adapters is None or not uses_adapters(pieces):
            return nullcontext()
        return self.adapters.applied(pieces, self.device)


def _note(pieces: Sequence[ScheduledChunk], read: Tensor, given: Tensor) -> None:
    """How novel tokens are: `read` of those that were known, `given` of those that were drawn, both in order."""
    for piece in pieces:
        known = piece.count - piece.samples_token
        bounded_state(piece.request).append(piece.start, torch.cat((read[:known], given[: piece.samples_token])))
        read, given = read[known:], given[int(piece.samples_token) :]
