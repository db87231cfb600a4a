"""Pages of head clusters on a GPU: decoding reads how the work is shared out from a table that was made before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from smelt.kernels.paged import Pages
from smelt.kvcache.eviction.policy import EvictionPolicy
from smelt.kvcache.rope import rope_functions
from smelt.models.model import Model
from smelt.runtime.decoder import Attention
from smelt.serve.engine.attention import NAME
from smelt.serve.engine.gpu_pages import Mixed, Send
from smelt.serve.engine.kv_dtype import told
from smelt.serve.engine.per_head.attention import ragged
from smelt.serve.engine.per_head.cache import RaggedCache
from smelt.serve.engine.per_head.compress import Judge
from smelt.serve.engine.per_head.parts import MOST_PARTS, parts_of, work_of
from smelt.serve.engine.per_head.step import Tables, holding_of, step_of
from smelt.serve.engine.runner import module_logits
from smelt.serve.engine.scheduler import Piece, Step

if TYPE_CHECKING:  # needs Triton
    from smelt.kernels.gpu.pages import HeadPages
    from smelt.runtime.gpu import Attend, FusedNetwork


class RaggedPages:
    """The pages' contract of a GPU runner, where clusters of heads keep different numbers of tokens."""

    def __init__(self, model: Model, cache: RaggedCache, retention: EvictionPolicy, context: int, send: Send) -> None:
        self.name = f", pages of head clusters{told(None if cache.format is None else cache.format.name)}"
        self.cache, self.retention, self.context = cache, retention, context
        self._send, self._module = send, model.network
        self._module.set_attn_implementation(NAME)
        self._judge = Judge(*rope_functions(model.network, model.device))
        self._tables = Tables(cache, len(cache.tables) - 1, send)
        self._layers: dict[tuple[int, int], tuple[HeadPages, int]] = {}

    def single(self, piece: Piece) -> bool:
        return piece.count == 1 and piece.start >= holding_of(piece).kept.stop

    def before(self, step: Step) -> None:
        self._tables.before(step)

    def after(self, step: Step) -> None:
        self._tables.after(step)

    def decoding(self, slots: Tensor, lengths: Tensor, network: FusedNetwork) -> Attend:
        from smelt.kernels.gpu.paged import Tokens, paged_decode

        tokens = Tokens(slots, lengths, self.cache.tables, network.arrived, self.context)

        def attend(mixed: Tensor, part: Attention) -> Tensor:
            pages, parts = self._layer(part.index, len(slots))
            return paged_decode(
                mixed, self.cache.keys, self.cache.values, tokens, network.rotation(part), part.scale, pages=pages,
                splits=parts, rows=self.cache.format,
            )  # fmt: skip

        return attend

    def mixed(self, pieces: list[Piece], slots: Tensor, positions: Tensor, network: FusedNetwork) -> Mixed:
        from smelt.kernels.gpu.paged import QueryTiles, paged_prefill, prefill_tiles
        from smelt.kernels.gpu.rope import rotate_write

        step = step_of(self.cache, pieces, torch.stack((slots, positions)), self._send)
        cache, form = self.cache, self.cache.format
        pages = Pages(step.bounds, step.lengths, cache.tables, positions, step.longest, step.counts)
        tiles = QueryTiles.of(step.counts, slots.device, prefill_tiles(pages, cache.keys.shape[-1], form))

        def attend(mixed: Tensor, part: Attention) -> Tensor:
            own, _ = self._layer(part.index, len(pieces))
            queries = rotate_write(mixed, positions, slots, network.rotation(part), cache.keys, cache.values, own, form)
            found = paged_prefill(
                queries, cache.keys, cache.values, pages, part.scale, tiles=tiles, heads_own=own,
                slots=step.piece_slots, rows=form,
            )  # fmt: skip
            # The judge decodes keys, which turns them back by the Hadamard matrix: its queries are to be as those are.
            self._judge(step, part.index, queries if form is None else form.back(queries), part.scale)
            return found.flatten(1)

        def logits(ids: Tensor, wanted: Tensor) -> Tensor:
            return module_logits(self._module, ragged(step, self._judge), ids, positions, wanted)

        return Mixed(attend, logits)

    def _layer(self, layer: int, requests: int) -> tuple[HeadPages, int]:
        """Whose pages are whose in a layer, and into how many parts a head's keys are split at most; made for the next
        power of two of requests, so that few are made."""
        from smelt.kernels.gpu.arch import processors
        from smelt.kernels.gpu.paged import KEYS, splits_for
        from smelt.kernels.gpu.pages import HeadPages

        requests = 1 << (requests - 1).bit_length()
        if (layer, requests) not in self._layers:
            cache = self.cache
            shares, chip = tuple(self.retention.head_splits[layer].tolist()), processors(cache.keys.device)
            most = max(min(MOST_PARTS, self.context // (2 * KEYS)), 1)
            alike = (splits_for(requests, len(shares), self.context, chip),) * len(shares)
            counts = alike if len(set(shares)) == 1 else parts_of(shares, requests, chip, most)
            own = HeadPages(
                cache.tables, cache.shifts, cache.cluster[layer], cache.column[layer], cache.columns,
                torch.tensor(work_of(shares, counts), dtype=torch.int32, device=cache.keys.device),
            )  # fmt: skip
            self._layers[layer, requests] = own, 1 << (max(counts) - 1).bit_length()
        return self._layers[layer, requests]
