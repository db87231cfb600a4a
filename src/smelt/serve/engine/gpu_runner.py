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
from smelt.serve.engine.runner import InflightBatch, end_tokens, last_tokens
from smelt.serve.engine.sampler import SamplerOutput, sample
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

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
class GpuInflightBatch(InflightBatch):
    """Its tokens are copied here as soon as they are there, beside the steps launched after it."""

    host: Tensor
    done: Any

    @classmethod
    def of(cls, step: ScheduledBatch, giving: list[Request], drawn: SamplerOutput) -> GpuInflightBatch:
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

    name = "fused-gpu"
    max_inflight_steps = 1

    def __init__(
        self, model: Model, pages: PagesFor, *, max_num_seqs: int, max_model_len: int, graphs: bool = True,
        adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        from smelt.runtime.gpu import FusedNetwork

        self.device, self.max_num_seqs, self.adapters = model.device, max_num_seqs, adapters
        self.eos_token_ids = end_tokens(model)
        self.pages = pages(self._sent)
        self.network = FusedNetwork(decoder_of(model, max_model_len), SIZES[-1])
        self.graphs = graphs and model.device.type == "cuda"
        self._last = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)
        self._captured: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None  # graphs run one after the other

    @property
    def backend(self) -> str:
        return f"{self.name}{self.pages.name}{' with CUDA graphs' if self.graphs else ''}"

    @torch.inference_mode()
    def warmup(self) -> None:
        """Captures every batch size that may come; the largest first, whose memory serves the others too."""
        if self.graphs:
            largest = next(size for size in SIZES if size >= min(self.max_num_seqs, SIZES[-1]))
            for size in reversed([size for size in SIZES if size <= largest]):
                self._graph(size)

    @torch.inference_mode()
    def launch(self, step: ScheduledBatch) -> InflightBatch:
        step.pieces.sort(key=lambda piece: not self.pages.single(piece))
        self.pages.before(step)
        giving = [piece.request for piece in step.pieces if piece.samples_token]
        adapted = self.adapters is not None and uses_adapters(step.pieces)
        if len(giving) == len(step.pieces) == step.tokens <= SIZES[-1] and not adapted:
            drawn: SamplerOutput | None = self._decode(step.pieces)
        else:
            drawn = self._mixed(step.pieces, giving, adapted)
        self.pages.after(step)
        if drawn is None or self.device.type != "cuda":
            return InflightBatch(step, giving, drawn)
        return GpuInflightBatch.of(step, giving, drawn)

    def _decode(self, pieces: list[ScheduledChunk]) -> SamplerOutput:
        """One token for each request: a graph, padded up to a size that was captured."""
        count = len(pieces)
        inputs = np.empty((3, next(size for size in SIZES if size >= count)), dtype=np.int64)
        inputs[:, count:] = [[self.max_num_seqs], [0], [0]]
        inputs[:, :count] = np.array([_row(piece.request, piece.start) for piece in pieces]).T
        sent = self._sent(inputs)
        tokens, logits = self._replayed(sent) if self.graphs else self._decoding(sent)
        requests = [piece.request for piece in pieces]
        if all(request.sampling.plain for request in requests):
            return SamplerOutput(tokens[:count].clone())
        drawn = sample(logits[:count], requests, self.eos_token_ids)
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
            inputs[0] = self.max_num_seqs
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

    def _mixed(self, pieces: list[ScheduledChunk], giving: list[Request], adapted: bool) -> SamplerOutput | None:
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
        drawn = sample(logits, giving, self.eos_token_ids)
        self._last[slots[wanted]] = drawn.tokens
        return drawn

    def _attend(self, pieces: list[ScheduledChunk], slots: Tensor, positions: Tensor) -> Attend:
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


def _tokens_of(pieces: list[ScheduledChunk]) -> np.ndarray[Any, Any]:
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
