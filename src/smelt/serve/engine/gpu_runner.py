"""Run steps on a GPU without synchronizing: decode in CUDA graphs, prefill eagerly.

A sampled token stays on the device, where the next step reads it, so that step can be launched before the host knows
the token. Block tables are on the device as well; a step sends what changed.
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

SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32))  # captured batch sizes
PagesFor = Callable[[Send], GpuPages]
UNKNOWN = -1  # stands for a token that only the device knows


@dataclass
class _Graph:
    """The decode step of one batch size, with the buffers it reads and writes."""

    graph: Any
    inputs: Tensor  # [3, size], int64: slots, lengths, tokens known to the host
    tokens: Tensor  # [size]
    logits: Tensor  # [size, vocabulary]


@dataclass(frozen=True)
class GpuInflightBatch(InflightBatch):
    """Copies its tokens to the host asynchronously, while later steps run."""

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
    """Implement `Runner` on a GPU. Without CUDA (under Triton's interpreter) there are no graphs."""

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
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None  # shared: graphs never run concurrently

    @property
    def backend(self) -> str:
        return f"{self.name}{self.pages.name}{' with CUDA graphs' if self.graphs else ''}"

    @torch.inference_mode()
    def warmup(self) -> None:
        """Capture every batch size, the largest first: the others reuse its memory."""
        if self.graphs:
            max_size = next(size for size in SIZES if size >= min(self.max_num_seqs, SIZES[-1]))
            for size in reversed([size for size in SIZES if size <= max_size]):
                self._graph(size)

    @torch.inference_mode()
    def launch(self, step: ScheduledBatch) -> InflightBatch:
        step.pieces.sort(key=lambda chunk: not self.pages.single(chunk))
        self.pages.before(step)
        requests = [chunk.request for chunk in step.pieces if chunk.samples_token]
        adapted = self.adapters is not None and uses_adapters(step.pieces)
        if len(requests) == len(step.pieces) == step.tokens <= SIZES[-1] and not adapted:
            output: SamplerOutput | None = self._decode(step.pieces)
        else:
            output = self._mixed(step.pieces, requests, adapted)
        self.pages.after(step)
        if output is None or self.device.type != "cuda":
            return InflightBatch(step, requests, output)
        return GpuInflightBatch.of(step, requests, output)

    def _decode(self, pieces: list[ScheduledChunk]) -> SamplerOutput:
        """Decode one token per request, padded to a captured batch size."""
        count = len(pieces)
        inputs = np.empty((3, next(size for size in SIZES if size >= count)), dtype=np.int64)
        inputs[:, count:] = [[self.max_num_seqs], [0], [0]]
        inputs[:, :count] = np.array([_row(chunk.request, chunk.start) for chunk in pieces]).T
        on_device = self._sent(inputs)
        tokens, logits = self._replayed(on_device) if self.graphs else self._decoding(on_device)
        requests = [chunk.request for chunk in pieces]
        if all(request.sampling.plain for request in requests):
            return SamplerOutput(tokens[:count].clone())
        output = sample(logits[:count], requests, self.eos_token_ids)
        self._last[on_device[0, :count]] = output.tokens
        return output

    def _replayed(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        captured = self._graph(inputs.shape[1])
        captured.inputs.copy_(inputs)
        captured.graph.replay()
        return captured.tokens, captured.logits

    def _graph(self, size: int) -> _Graph:
        if size not in self._captured:
            inputs = torch.zeros(3, size, dtype=torch.int64, device=self.device)
            inputs[0] = self.max_num_seqs
            for _ in range(2):  # compile and autotune before the capture
                self._decoding(inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                tokens, logits = self._decoding(inputs)
            self._captured[size] = _Graph(graph, inputs, tokens, logits)
        return self._captured[size]

    def _decoding(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Run a decode step on the device; return tokens [size] and logits [size, vocabulary]."""
        from smelt.kernels.gpu.fused_ops import argmax_tokens, embed

        slots, lengths, known = inputs
        attend = self.pages.decoding(slots, lengths, self.network)
        hidden = self.network.hidden(embed(known, slots, self._last, self.network.decoder.table), attend)
        logits = self.network.logits(hidden)
        return argmax_tokens(logits, slots, self._last), logits

    def _mixed(self, pieces: list[ScheduledChunk], giving: list[Request], adapted: bool) -> SamplerOutput | None:
        """Run a step with prompt chunks, behind decode tokens if any; steps with adapters run eagerly."""
        known, slots, positions = self._sent(_tokens_of(pieces))
        rows = self._sent(np.array(last_tokens(pieces), dtype=np.int64))
        if adapted:
            assert self.adapters is not None
            ids = torch.where(known >= 0, known, self._last[slots])
            with self.adapters.applied(pieces, self.device):
                logits = self.pages.mixed(pieces, slots, positions, self.network).logits(ids, rows)
        else:
            logits = self._fused(known, slots, self._attend(pieces, slots, positions), rows)
        if not giving:
            return None
        output = sample(logits, giving, self.eos_token_ids)
        self._last[slots[rows]] = output.tokens
        return output

    def _attend(self, pieces: list[ScheduledChunk], slots: Tensor, positions: Tensor) -> Attend:
        """Return attention that uses the decode kernel for single tokens: it reads keys once per head group."""
        count = min(sum(self.pages.single(chunk) for chunk in pieces), SIZES[-1])
        if not count:
            return self.pages.mixed(pieces, slots, positions, self.network).attend
        decode = self.pages.decoding(slots[:count], positions[:count] + 1, self.network)
        if count == len(pieces):
            return decode
        prefill = self.pages.mixed(pieces[count:], slots[count:], positions[count:], self.network).attend
        return lambda mixed, part: torch.cat((decode(mixed[:count], part), prefill(mixed[count:], part)))

    def _fused(self, known: Tensor, slots: Tensor, attend: Attend, wanted: Tensor) -> Tensor:
        """Return the logits of the `wanted` rows."""
        from smelt.kernels.gpu.fused_ops import embed

        hidden = self.network.hidden(embed(known, slots, self._last, self.network.decoder.table), attend)
        return self.network.logits(hidden[wanted]) if len(wanted) else hidden

    def _sent(self, values: np.ndarray[Any, Any]) -> Tensor:
        """Copy an array to the device asynchronously."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor.clone()


def _row(request: Request, at: int) -> tuple[int, int, int]:
    """Return a request's slot, its length including position `at`, and the token there if known."""
    return request.slot, at + 1, request.tokens[at] if at < len(request.tokens) else UNKNOWN


def _tokens_of(pieces: list[ScheduledChunk]) -> np.ndarray[Any, Any]:
    """Return token ids (where known), slots and positions of a step, [3, tokens]."""
    tokens = np.empty((3, sum(chunk.count for chunk in pieces)), dtype=np.int64)
    offset = 0
    for chunk in pieces:
        known = chunk.request.tokens[chunk.start : chunk.start + chunk.count]
        span = tokens[:, offset : offset + chunk.count]
        span[0] = [*known, *[UNKNOWN] * (chunk.count - len(known))]
        span[1], span[2] = chunk.request.slot, np.arange(chunk.start, chunk.start + chunk.count)
        offset += chunk.count
    return tokens
