"""Steps on a GPU: decoding in captured graphs, prompts launched as they come, and nothing waited for.

The token that a request was given stays on the device, where its next step finds it, so that the next step can be
launched before this one's tokens are known here. Block tables lie on the device too; a step sends what changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smelt.kernels.paged import Pages
from smelt.models.model import Model
from smelt.serve.engine.adapters import Adapters, uses_adapters
from smelt.serve.engine.attention import NAME, PagedCache
from smelt.serve.engine.decoder import Attention, decoder_of
from smelt.serve.engine.request import Request
from smelt.serve.engine.runner import Launched, end_tokens, module_logits
from smelt.serve.engine.sampler import Drawn, draw
from smelt.serve.engine.scheduler import Piece, Step

SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32))  # of batches that are captured
UNKNOWN = -1  # in place of a token that only the device knows


@dataclass
class _Graph:
    """A decoding step of one batch size, with the buffers it reads and writes."""

    graph: Any
    inputs: Tensor  # [4, size], int64: slots, lengths, places, tokens known here
    tokens: Tensor  # [size]
    logits: Tensor  # [size, vocabulary]


@dataclass(frozen=True)
class Fetched(Launched):
    """Its tokens are copied here as soon as they are there, beside the steps launched after it."""

    host: Tensor
    done: Any

    @classmethod
    def of(cls, step: Step, giving: list[Request], drawn: Drawn) -> Fetched:
        host = torch.empty(len(giving), dtype=torch.int64, pin_memory=True)
        host.copy_(drawn.tokens, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(step, giving, drawn, host, done)

    def tokens(self) -> list[int]:
        self.done.synchronize()
        return list(self.host.tolist())


class GpuRunner:
    """The runner's contract, on a device. Without CUDA (under Triton's interpreter) there are no graphs."""

    name = "gpu-program"
    ahead = 1

    def __init__(
        self, model: Model, *, blocks: int, size: int, most_tokens: int, most_requests: int, context: int,
        graphs: bool = True, adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        from smelt.serve.engine.fused import FusedNetwork

        self.size, self.device, self.most_requests = size, model.device, most_requests
        self.ends = end_tokens(model)
        self.context = context
        self.cache = PagedCache.empty(model.anatomy, blocks, size, model.network.dtype, model.device)
        self.module, self.adapters = model.network, adapters
        self.module.set_attn_implementation(NAME)
        self.network = FusedNetwork(decoder_of(model, context))
        self.graphs = graphs and model.device.type == "cuda"
        width = -(-context // size)
        self._tables = torch.zeros(most_requests + 1, width, dtype=torch.int32, device=self.device)
        heads = max(part.kv_heads for part in self.network.decoder.parts if isinstance(part, Attention))
        self._arrived = torch.zeros(SIZES[-1] * heads, dtype=torch.int32, device=self.device)
        self._last = torch.zeros(most_requests + 1, dtype=torch.int64, device=self.device)
        self._written: list[tuple[list[int], int]] = [([], 0)] * most_requests  # blocks of a row, and how many of them
        self._captured: dict[int, _Graph] = {}

    @property
    def path(self) -> str:
        return f"{self.name} with graphs" if self.graphs else self.name

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        self._write_tables(step.pieces)
        giving = [piece.request for piece in step.pieces if piece.gives]
        adapted = self.adapters is not None and uses_adapters(step.pieces)
        if len(giving) == len(step.pieces) == step.tokens <= SIZES[-1] and not adapted:
            drawn: Drawn | None = self._decode(step.pieces)
        else:
            drawn = self._mixed(step.pieces, giving, adapted)
        if drawn is None or self.device.type != "cuda":
            return Launched(step, giving, drawn)
        return Fetched.of(step, giving, drawn)

    def _decode(self, pieces: list[Piece]) -> Drawn:
        """One token for each request: a graph, padded up to a size that was captured."""
        count = len(pieces)
        inputs = np.empty((4, next(size for size in SIZES if size >= count)), dtype=np.int64)
        inputs[:, count:] = [[self.most_requests], [0], [-1], [0]]
        inputs[:, :count] = np.array([self._row(piece.request, piece.start) for piece in pieces]).T
        sent = self._sent(inputs)
        tokens, logits = self._replayed(sent) if self.graphs else self._decoding(sent)
        requests = [piece.request for piece in pieces]
        if all(request.sampling.plain for request in requests):
            return Drawn(tokens[:count].clone())
        drawn = draw(logits[:count], requests, self.ends)
        self._last[sent[0, :count]] = drawn.tokens
        return drawn

    def _row(self, request: Request, at: int) -> tuple[int, int, int, int]:
        """A request's slot, its length with the token at this position, where that token goes, and what it is."""
        place = request.blocks[at // self.size] * self.size + at % self.size
        return request.slot, at + 1, place, request.tokens[at] if at < len(request.tokens) else UNKNOWN

    def _replayed(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        captured = self._graph(inputs.shape[1])
        captured.inputs.copy_(inputs)
        captured.graph.replay()
        return captured.tokens, captured.logits

    def _graph(self, size: int) -> _Graph:
        if size not in self._captured:
            inputs = torch.zeros(4, size, dtype=torch.int64, device=self.device)
            inputs[0], inputs[2] = self.most_requests, -1
            for _ in range(2):  # what is compiled or chosen on first use must not be captured
                self._decoding(inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                tokens, logits = self._decoding(inputs)
            self._captured[size] = _Graph(graph, inputs, tokens, logits)
        return self._captured[size]

    def _decoding(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """All of a decoding step on the device: tokens [size] and logits."""
        from smelt.kernels.gpu.decoder import embed, most_likely
        from smelt.kernels.gpu.paged import Tokens, paged_decode

        slots, lengths, places, known = inputs
        tokens = Tokens(slots, lengths, places, self._tables, self._arrived, self.context)

        def attend(mixed: Tensor, part: Attention) -> Tensor:
            keys, values = self.cache.keys[part.index], self.cache.values[part.index]
            return paged_decode(mixed, keys, values, tokens, self.network.rotation(part), part.scale, part.window)

        hidden = self.network.hidden(embed(known, slots, self._last, self.network.decoder.table), attend)
        logits = self.network.logits(hidden)
        return most_likely(logits, slots, self._last), logits

    def _mixed(self, pieces: list[Piece], giving: list[Request], adapted: bool) -> Drawn | None:
        """Prompts, or prompts beside single tokens; and whatever has adapters, which runs as it is."""
        counts = [piece.count for piece in pieces]
        tokens = self._sent(_tokens_of(pieces, self.size))  # [4, tokens]: known tokens, slots, positions, places
        known, slots, positions, places = tokens
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lengths = np.array([piece.start + piece.count for piece in pieces], dtype=np.int32)
        rows = self._sent(np.array([piece.request.slot for piece in pieces], dtype=np.int64))
        pages = Pages(
            starts=self._sent(bounds), lengths=self._sent(lengths), tables=self._tables[rows], places=places,
            longest=int(lengths.max()), counts=counts,
        )  # fmt: skip
        wanted = self._sent(
            np.array([bounds[row + 1] - 1 for row, piece in enumerate(pieces) if piece.gives], dtype=np.int64)
        )
        if adapted:
            assert self.adapters is not None
            ids = torch.where(known >= 0, known, self._last[slots])
            with self.adapters.applied(pieces, self.device):
                logits = module_logits(self.module, self.cache, ids, positions, wanted, pages)
        else:
            logits = self._prefilled(tokens, pages, wanted)
        if not giving:
            return None
        drawn = draw(logits, giving, self.ends)
        self._last[slots[wanted]] = drawn.tokens
        return drawn

    def _prefilled(self, tokens: Tensor, pages: Pages, wanted: Tensor) -> Tensor:
        """Logits of the wanted tokens."""
        from smelt.kernels.gpu.decoder import embed
        from smelt.kernels.gpu.paged import QueryTiles, paged_prefill
        from smelt.kernels.gpu.rotation import rotate_write

        known, slots, positions, places = tokens
        tiles = QueryTiles.of(pages.counts, self.device)

        def attend(mixed: Tensor, part: Attention) -> Tensor:
            keys, values = self.cache.keys[part.index], self.cache.values[part.index]
            queries = rotate_write(mixed, positions, places, self.network.rotation(part), keys, values)
            return paged_prefill(queries, keys, values, pages, part.scale, part.window, tiles=tiles).flatten(1)

        hidden = self.network.hidden(embed(known, slots, self._last, self.network.decoder.table), attend)
        return self.network.logits(hidden[wanted]) if len(wanted) else hidden

    def _write_tables(self, pieces: list[Piece]) -> None:
        """Blocks that requests were given since their last step, in one copy for all."""
        places, blocks = [], []
        width = self._tables.shape[1]
        for piece in pieces:
            request = piece.request
            held, count = self._written[request.slot]
            if held is not request.blocks:  # another request's, or those that it had before it was preempted
                count = 0
            if count < len(request.blocks):
                places += [request.slot * width + place for place in range(count, len(request.blocks))]
                blocks += request.blocks[count:]
                self._written[request.slot] = (request.blocks, len(request.blocks))
        if blocks:
            both = self._sent(np.array([places, blocks], dtype=np.int64))
            self._tables.view(-1)[both[0]] = both[1].int()

    def _sent(self, values: np.ndarray[Any, Any]) -> Tensor:
        """On its way to the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor.clone()


def _tokens_of(pieces: list[Piece], size: int) -> np.ndarray[Any, Any]:
    """Of every token of a step: itself where it is known, its request's slot, its position, its place. [4, tokens]"""
    found = np.empty((4, sum(piece.count for piece in pieces)), dtype=np.int64)
    at = 0
    for piece in pieces:
        request, start, stop = piece.request, piece.start, piece.start + piece.count
        positions = np.arange(start, stop)
        known = request.tokens[start:stop]
        blocks = np.array(request.blocks[start // size : (stop - 1) // size + 1], dtype=np.int64)
        here = found[:, at : at + piece.count]
        here[0] = [*known, *[UNKNOWN] * (piece.count - len(known))]
        here[1], here[2] = request.slot, positions
        here[3] = blocks[positions // size - start // size] * size + positions % size
        at += piece.count
    return found
