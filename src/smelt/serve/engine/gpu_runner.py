"""Steps on a GPU: decoding in captured graphs, prompts launched as they come, and nothing waited for.

The token that a request was given stays on the device, where its next step finds it, so that the next step can be
launched before this one's tokens are known here. Block tables lie on the device too; a step sends what changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from smelt.models.model import Model
from smelt.runtime.decoder import decoder_of
from smelt.serve.engine.adapters import Adapters, uses_adapters
from smelt.serve.engine.gpu_pages import GpuPages, Send
from smelt.serve.engine.request import Request
from smelt.serve.engine.runner import Launched, end_tokens, last_tokens
from smelt.serve.engine.sampler import Drawn, draw
from smelt.serve.engine.scheduler import Piece, Step

if TYPE_CHECKING:
    from smelt.runtime.gpu import Attend

SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32))  # of batches that are captured
PagesFor = Callable[[Send], GpuPages]
UNKNOWN = -1  # in place of a token that only the device knows


@dataclass
class _Graph:
    """A decoding step of one batch size, with the buffers it reads and writes."""

    graph: Any
    inputs: Tensor  # [3, size], int64: slots, lengths, tokens known here
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
        self, model: Model, pages: PagesFor, *, most_requests: int, context: int, graphs: bool = True,
        adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        from smelt.runtime.gpu import FusedNetwork

        self.device, self.most_requests, self.adapters = model.device, most_requests, adapters
        self.ends = end_tokens(model)
        self.pages = pages(self._sent)
        self.network = FusedNetwork(decoder_of(model, context), SIZES[-1])
        self.graphs = graphs and model.device.type == "cuda"
        self._last = torch.zeros(most_requests + 1, dtype=torch.int64, device=self.device)
        self._captured: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None  # graphs run one after the other

    @property
    def path(self) -> str:
        return f"{self.name}{self.pages.name}{' with graphs' if self.graphs else ''}"

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures every batch size that may come; the largest first, whose memory serves the others too."""
        if self.graphs:
            largest = next(size for size in SIZES if size >= min(self.most_requests, SIZES[-1]))
            for size in reversed([size for size in SIZES if size <= largest]):
                self._graph(size)

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        step.pieces.sort(key=lambda piece: not self.pages.single(piece))
        self.pages.before(step)
        giving = [piece.request for piece in step.pieces if piece.gives]
        adapted = self.adapters is not None and uses_adapters(step.pieces)
        if len(giving) == len(step.pieces) == step.tokens <= SIZES[-1] and not adapted:
            drawn: Drawn | None = self._decode(step.pieces)
        else:
            drawn = self._mixed(step.pieces, giving, adapted)
        self.pages.after(step)
        if drawn is None or self.device.type != "cuda":
            return Launched(step, giving, drawn)
        return Fetched.of(step, giving, drawn)

    def _decode(self, pieces: list[Piece]) -> Drawn:
        """One token for each request: a graph, padded up to a size that was captured."""
        count = len(pieces)
        inputs = np.empty((3, next(size for size in SIZES if size >= count)), dtype=np.int64)
        inputs[:, count:] = [[self.most_requests], [0], [0]]
        inputs[:, :count] = np.array([_row(piece.request, piece.start) for piece in pieces]).T
        sent = self._sent(inputs)
        tokens, logits = self._replayed(sent) if self.graphs else self._decoding(sent)
        requests = [piece.request for piece in pieces]
        if all(request.sampling.plain for request in requests):
            return Drawn(tokens[:count].clone())
        drawn = draw(logits[:count], requests, self.ends)
        self._last[sent[0, :count]] = drawn.tokens
        return drawn

    def _replayed(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        captured = self._graph(inputs.shape[1])
        captured.inputs.copy_(inputs)
        captured.graph.replay()
        return captured.tokens, captured.logits

    def _graph(self, size: int) -> _Graph:
        if size not in self._captured:
            inputs = torch.zeros(3, size, dtype=torch.int64, device=self.device)
            inputs[0] = self.most_requests
            for _ in range(2):  # what is compiled or chosen on first use must not be captured
                self._decoding(inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                tokens, logits = self._decoding(inputs)
            self._captured[size] = _Graph(graph, inputs, tokens, logits)
        return self._captured[size]

    def _decoding(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """All of a decoding step on the device: tokens [size] and logits."""
        from smelt.kernels.gpu.fused_ops import argmax_tokens, embed

        slots, lengths, known = inputs
        attend = self.pages.decoding(slots, lengths, self.network)
        hidden = self.network.hidden(embed(known, slots, self._last, self.network.decoder.table), attend)
        logits = self.network.logits(hidden)
        return argmax_tokens(logits, slots, self._last), logits

    def _mixed(self, pieces: list[Piece], giving: list[Request], adapted: bool) -> Drawn | None:
        """Prompts, or prompts behind single tokens; and whatever has adapters, which runs as it is."""
        known, slots, positions = self._sent(_tokens_of(pieces))
        wanted = self._sent(np.array(last_tokens(pieces), dtype=np.int64))
        if adapted:
            assert self.adapters is not None
            ids = torch.where(known >= 0, known, self._last[slots])
            with self.adapters.applied(pieces, self.device):
                logits = self.pages.mixed(pieces, slots, positions, self.network).logits(ids, wanted)
        else:
            logits = self._fused(known, slots, self._attend(pieces, slots, positions), wanted)
        if not giving:
            return None
        drawn = draw(logits, giving, self.ends)
        self._last[slots[wanted]] = drawn.tokens
        return drawn

    def _attend(self, pieces: list[Piece], slots: Tensor, positions: Tensor) -> Attend:
        """Single tokens by the kernel that decodes, which reads keys once for all heads of a group."""
        count = min(sum(self.pages.single(piece) for piece in pieces), SIZES[-1])
        if not count:
            return self.pages.mixed(pieces, slots, positions, self.network).attend
        single = self.pages.decoding(slots[:count], positions[:count] + 1, self.network)
        if count == len(pieces):
            return single
        others = self.pages.mixed(pieces[count:], slots[count:], positions[count:], self.network).attend
        return lambda mixed, part: torch.cat((single(mixed[:count], part), others(mixed[count:], part)))

    def _fused(self, known: Tensor, slots: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """Logits of the wanted tokens."""
        from smelt.kernels.gpu.fused_ops import embed

        hidden = self.network.hidden(embed(known, slots, self._last, self.network.decoder.table), attend)
        return self.network.logits(hidden[wanted]) if len(wanted) else hidden

    def _sent(self, values: np.ndarray[Any, Any]) -> Tensor:
        """On its way to the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor.clone()


def _row(request: Request, at: int) -> tuple[int, int, int]:
    """A request's slot, its length with the token at this position, and that token where it is known."""
    return request.slot, at + 1, request.tokens[at] if at < len(request.tokens) else UNKNOWN


def _tokens_of(pieces: list[Piece]) -> np.ndarray[Any, Any]:
    """Of every token of a step: itself where it is known, its request's slot, its position. [3, tokens]"""
    found = np.empty((3, sum(piece.count for piece in pieces)), dtype=np.int64)
    at = 0
    for piece in pieces:
        known = piece.request.tokens[piece.start : piece.start + piece.count]
        here = found[:, at : at + piece.count]
        here[0] = [*known, *[UNKNOWN] * (piece.count - len(known))]
        here[1], here[2] = piece.request.slot, np.arange(piece.start, piece.start + piece.count)
        at += piece.count
    return found
