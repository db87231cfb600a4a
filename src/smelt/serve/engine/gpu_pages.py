"""The pages of a GPU runner: what a step sends to the device about them, and attention over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from smelt.kernels.attention_metadata import AttentionMetadata
from smelt.models.model import Model
from smelt.runtime.decoder import Attention
from smelt.serve.engine.attention import NAME, PagedCache, paged
from smelt.serve.engine.kv_dtype import backend_suffix
from smelt.serve.engine.runner import module_logits
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

if TYPE_CHECKING:  # needs Triton
    from smelt.runtime.gpu import Attend, FusedNetwork

Send = Callable[[np.ndarray[Any, Any]], Tensor]  # to the device


@dataclass(frozen=True)
class Mixed:
    """A step of prompts, or of prompts beside single tokens."""

    attend: Attend
    logits: Callable[
        [Tensor, Tensor], Tensor
    ]  # of the module as it is, from ids and the tokens whose logits are wanted


class GpuPages(Protocol):
    """What a GPU runner needs of its cache."""

    name: str  # in the path

    def single(self, piece: ScheduledChunk) -> bool:
        """Whether a piece is a token by itself, with nothing to be done when it is computed."""

    def before(self, step: ScheduledBatch) -> None:
        """What changed since the last step."""

    def decoding(self, slots: Tensor, lengths: Tensor, network: FusedNetwork) -> Attend:
        """Attention of one token for each request; nothing in it may depend on the step, so that it can be captured."""

    def mixed(self, pieces: list[ScheduledChunk], slots: Tensor, positions: Tensor, network: FusedNetwork) -> Mixed: ...

    def after(self, step: ScheduledBatch) -> None:
        """What the step changed."""


class PagedGpuPages:
    """Pages of a layer hold all its heads, and every token."""

    def __init__(
        self,
        model: Model,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        kind: str | None,
        send: Send,
    ) -> None:
        self.name = backend_suffix(kind)
        self.block_size, self.max_model_len, self._send, self._module = block_size, max_model_len, send, model.network
        self.cache = PagedCache.empty(model.anatomy, num_blocks, block_size, model.network.dtype, model.device, kind)
        model.network.set_attn_implementation(NAME)
        self._tables = torch.zeros(
            max_num_seqs + 1, -(-max_model_len // block_size), dtype=torch.int32, device=model.device
        )
        self._written: list[tuple[list[int], int]] = [([], 0)] * max_num_seqs  # blocks of a row, and how many of them

    def single(self, piece: ScheduledChunk) -> bool:
        return piece.count == 1

    def before(self, step: ScheduledBatch) -> None:
        """Blocks that requests were given since their last step, in one copy for all."""
        places, blocks = [], []
        width = self._tables.shape[1]
        for piece in step.pieces:
            request = piece.request
            held, count = self._written[request.slot]
            if held is not request.blocks:  # another request's, or those that it had before it was preempted
                count = 0
            if count < len(request.blocks):
                places += [request.slot * width + place for place in range(count, len(request.blocks))]
                blocks += request.blocks[count:]
                self._written[request.slot] = (request.blocks, len(request.blocks))
        if blocks:
            both = self._send(np.array([places, blocks], dtype=np.int64))
            self._tables.view(-1)[both[0]] = both[1].int()

    def decoding(self, slots: Tensor, lengths: Tensor, network: FusedNetwork) -> Attend:
        from smelt.kernels.gpu.paged import DecodeMetadata, paged_decode

        tokens = DecodeMetadata(slots, lengths, self._tables, network.arrived, self.max_model_len)

        def attend(mixed: Tensor, part: Attention) -> Tensor:
            keys, values, *_, form = self.cache.layer(part.index)
            turning = network.rotation(part)
            return paged_decode(mixed, keys, values, tokens, turning, part.scale, part.window, kv_quant=form)

        return attend

    def mixed(self, pieces: list[ScheduledChunk], slots: Tensor, positions: Tensor, network: FusedNetwork) -> Mixed:
        from smelt.kernels.gpu.paged import QueryTiles, paged_prefill, prefill_config
        from smelt.kernels.gpu.rope import rope_and_store_kv

        counts = [piece.count for piece in pieces]
        lengths = np.array([piece.start + piece.count for piece in pieces], dtype=np.int32)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = self._send(np.array([piece.request.slot for piece in pieces], dtype=np.int64))
        places = (
            self._tables[slots, positions // self.block_size].long() * self.block_size + positions % self.block_size
        )
        pages = AttentionMetadata(
            cu_seqlens_q=self._send(bounds), seq_lens=self._send(lengths), block_tables=self._tables[rows],
            slot_mapping=places, max_seq_len=int(lengths.max()), query_lens=counts,
        )  # fmt: skip
        first = self.cache.layer(min(self.cache.keys))
        tiles = QueryTiles.of(counts, slots.device, prefill_config(pages, first.keys.shape[-1], first.kv_quant))

        def attend(mixed: Tensor, part: Attention) -> Tensor:
            keys, values, *_, form = self.cache.layer(part.index)
            queries = rope_and_store_kv(mixed, positions, places, network.rotation(part), keys, values, kv_quant=form)
            found = paged_prefill(queries, keys, values, pages, part.scale, part.window, tiles=tiles, kv_quant=form)
            return found.flatten(1)

        def logits(ids: Tensor, wanted: Tensor) -> Tensor:
            return module_logits(self._module, paged(self.cache, pages), ids, positions, wanted)

        return Mixed(attend, logits)

    def after(self, step: ScheduledBatch) -> None:
        """Nothing: every token stays where it is."""
