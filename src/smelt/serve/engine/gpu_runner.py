"""Run steps on a GPU without synchronizing: decode and short prompts in CUDA graphs, other steps eagerly.

A sampled token stays on the device, where the next step reads it, so that step can be launched before the host knows
the token. Block tables are on the device as well; a step copies what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.kernels.attention_metadata import SHORT_CONTEXT
from smelt.kernels.lora import LoraTiles
from smelt.models.lora import StackedFactors
from smelt.models.model import Model
from smelt.progress import Progress
from smelt.runtime.decoder import build_decoder, linear_groups
from smelt.serve.engine.adapters import Adapters, uses_adapters
from smelt.serve.engine.block_table import ToDevice
from smelt.serve.engine.gpu_pages import MAX_PREFILL_CHUNKS, GpuPages, PagedGpuPages, PrefillInputs
from smelt.serve.engine.prompt_logprobs import compute_prompt_logprobs, num_prompt_logits, prompt_logits_indices
from smelt.serve.engine.request import Request
from smelt.serve.engine.runner import InflightBatch, find_eos_token_ids, sampled_requests, sampling_indices
from smelt.serve.engine.sampler import SamplerOutput, sample
from smelt.serve.engine.scheduler import ScheduledBatch, ScheduledChunk

if TYPE_CHECKING:
    from smelt.runtime.gpu import Attend, FusedNetwork

CAPTURE_SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32))  # captured batch sizes
EXTENDED_CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # of extended steps
# Captured numbers of prompt tokens. With more, the GPU computes longer than the host takes to launch its kernels.
PREFILL_SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
PagesFactory = Callable[[ToDevice], GpuPages]
PLACEHOLDER_TOKEN_ID = -1  # of a token that only the device has: its request's last one


@dataclass
class _Graph:
    """The decode step of one batch size, or a prefill step of one number of tokens, with the buffers it reads and
    writes."""

    graph: Any
    inputs: Tensor  # int64: slots, seq_lens and token ids, or those of PrefillInputs; then what `_hidden` reads
    tokens: Tensor  # [size]
    logits: Tensor  # [size, vocabulary]

    def replay(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Run the step on other inputs; return its tokens and logits."""
        self.inputs.copy_(values)
        self.graph.replay()
        return self.tokens, self.logits


@dataclass(frozen=True)
class GpuInflightBatch(InflightBatch):
    """Copies its tokens to the host asynchronously, while later steps run."""

    host_tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    copied: Any = None  # CUDA event

    @classmethod
    def start_copy(cls, launched: InflightBatch) -> GpuInflightBatch:
        requests, output = launched.requests, launched.sampler_output
        assert output is not None
        host_tokens = torch.empty(len(requests), dtype=torch.int64, pin_memory=True)
        host_tokens.copy_(output.tokens, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(launched.batch, requests, output, launched.prompt_logprobs, host_tokens, copied)

    def tokens(self) -> list[int]:
        self.copied.synchronize()
        return list(self.host_tokens.tolist())


class GpuRunner:
    """Implement `Runner` on a GPU. Without CUDA (under Triton's interpreter) there are no graphs.

    A step with LoRA adapters is extended: it launches kernels that others do not have, so it has graphs of its own.
    """

    name = "fused-gpu"
    max_inflight_steps = 1
    extension = "with adapters"  # of extended steps

    def __init__(
        self, model: Model, make_pages: PagesFactory, *, max_num_seqs: int, max_model_len: int,
        cuda_graphs: bool = True, adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        self.device, self.max_num_seqs, self.adapters = model.device, max_num_seqs, adapters
        self.max_model_len = max_model_len
        self.eos_token_ids = find_eos_token_ids(model)
        self.pages = make_pages(self._to_device)
        stacks = None
        if adapters is not None:
            adapters.stack(linear_groups(model))
            stacks = adapters.stacks
        self.network = self._build_network(model, stacks)
        self.cuda_graphs = cuda_graphs and model.device.type == "cuda"
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)
        self._captured: dict[tuple[int, int], _Graph] = {}  # by batch size and bound of the sequence lengths
        self._captured_prefill: dict[int, _Graph] = {}
        self._captured_extended: dict[tuple[int, int], _Graph] = {}  # the same for extended steps
        self._captured_extended_prefill: dict[int, _Graph] = {}
        self._pool = (
            torch.cuda.graph_pool_handle() if self.cuda_graphs else None
        )  # shared: graphs never run concurrently

    def _build_network(self, model: Model, stacks: Mapping[nn.Module, StackedFactors] | None) -> FusedNetwork:
        from smelt.runtime.gpu import FusedNetwork

        return FusedNetwork(build_decoder(model, self.max_model_len), CAPTURE_SIZES[-1], stacks)

    @property
    def backend(self) -> str:
        return f"{self.name}{self.pages.name}{' with CUDA graphs' if self.cuda_graphs else ''}"

    @torch.inference_mode()
    def warmup(self, progress: Progress) -> None:
        """Compile all kernels, and capture every batch size, the largest first: the others reuse its memory."""
        from smelt.runtime.gpu import compile_kernels

        if self.cuda_graphs:
            sources = self.network.kernel_sources()
            for _ in progress.track(compile_kernels(sources), "compiling kernels", len(sources)):
                pass
            for extended in (False, True) if self._has_extended_steps else (False,):
                self._capture_all(progress, extended)

    def _capture_all(self, progress: Progress, extended: bool) -> None:
        what = f" {self.extension}" if extended else ""
        prefill = PREFILL_SIZES if isinstance(self.pages, PagedGpuPages) else ()
        for size in progress.track(prefill[::-1], f"capturing prompts{what}"):
            self._captured_prefill_graph(size, extended)
        sizes = _decode_sizes(extended)
        max_size = next(size for size in sizes if size >= min(self.max_num_seqs, sizes[-1]))
        decode = [size for size in sizes if size <= max_size]
        for size in progress.track(decode[::-1], f"capturing batch sizes{what}"):
            for bound in {self.max_model_len, self._seq_len_bound(size, 1)}:
                self._captured_graph(size, bound, extended)

    def _seq_len_bound(self, size: int, longest: int) -> int:
        """Return the bound of sequence lengths of the graph for a decode step: short contexts of a single request have
        their own, with another attention kernel."""
        return min(SHORT_CONTEXT if size == 1 and longest <= SHORT_CONTEXT else self.max_model_len, self.max_model_len)

    @property
    def _has_extended_steps(self) -> bool:
        return self.adapters is not None and self.adapters.max_loras > 0

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> InflightBatch:
        batch.chunks.sort(key=lambda chunk: (not self.pages.is_decode(chunk), not chunk.samples_token))
        self.pages.prepare(batch)
        parts = self._captured_parts(batch)
        launched = self._run_mixed(batch) if parts is None else self._run_captured(batch, parts)
        self.pages.finish(batch)
        if launched.sampler_output is None or self.device.type != "cuda":
            return launched
        return GpuInflightBatch.start_copy(launched)

    def _is_decode(self, chunk: ScheduledChunk) -> bool:
        """Return whether a chunk is a single token that the decode kernel can compute and that gives a new one."""
        return self.pages.is_decode(chunk) and chunk.samples_token

    def _captured_parts(self, batch: ScheduledBatch) -> list[list[ScheduledChunk]] | None:
        """Split a step into parts that CUDA graphs can compute one after another; None if graphs cannot compute it.

        One graph computes prompts and a few decode tokens. Where there are too many of them, decode tokens have a graph
        of their own: reading the weights once more takes less time than launching all kernels from the host.
        """
        chunks = batch.chunks
        count = sum(map(self._is_decode, chunks))  # these are first
        decodes, prompts = chunks[:count], chunks[count:]
        if count > CAPTURE_SIZES[-1]:
            return None
        if not prompts:
            return [decodes]
        if not isinstance(self.pages, PagedGpuPages) or any(
            _is_long(chunk) or num_prompt_logits(chunk) or chunk.count > PREFILL_SIZES[-1] for chunk in prompts
        ):
            return None
        if _fits_prefill(chunks) and not any(map(_is_long, decodes)):
            return [chunks]
        parts = [decodes] if decodes else []
        part: list[ScheduledChunk] = []
        for chunk in prompts:
            if not _fits_prefill([*part, chunk]):
                parts.append(part)
                part = []
            part.append(chunk)
        return [*parts, part]

    def _run_captured(self, batch: ScheduledBatch, parts: list[list[ScheduledChunk]]) -> InflightBatch:
        requests = [request for part in parts for request in sampled_requests(part)]
        plain = all(request.sampling.plain for request in requests)
        tokens, logits = [], []
        for part in parts:
            is_decode = all(map(self._is_decode, part))
            step_tokens, step_logits = self._run_decode(part) if is_decode else self._run_prefill(part)
            tokens.append(step_tokens.clone())  # the next graph uses the same memory
            if not plain:
                logits.append(step_logits.clone() if len(parts) > 1 else step_logits)
        if not requests:
            return InflightBatch(batch, requests, None)
        if plain:
            return InflightBatch(batch, requests, SamplerOutput(torch.cat(tokens)))
        output = sample(torch.cat(logits), requests, self.eos_token_ids)
        slots = np.array([request.slot for request in requests], dtype=np.int64)
        self._last_tokens[self._to_device(slots)] = output.tokens
        return InflightBatch(batch, requests, output)

    def _run_decode(self, chunks: list[ScheduledChunk]) -> tuple[Tensor, Tensor]:
        """Decode one token per request, padded to a captured batch size; return tokens and logits."""
        count, extended = len(chunks), self._is_extended(chunks)
        size = next(size for size in _decode_sizes(extended) if size >= count)
        inputs = np.empty((3, size), dtype=np.int64)
        inputs[:, count:] = [[self.max_num_seqs], [0], [0]]
        inputs[:, :count] = np.array([_decode_values(chunk.request, chunk.start) for chunk in chunks]).T
        values = self._decode_inputs(inputs.ravel(), chunks, size)
        bound = self._seq_len_bound(size, int(inputs[1].max()))
        if self.cuda_graphs:
            tokens, logits = self._captured_graph(size, bound, extended).replay(values)
        else:
            tokens, logits = self._forward_decode(values, size, bound)
        return tokens[:count], logits[:count]

    def _is_extended(self, chunks: Sequence[ScheduledChunk]) -> bool:
        return self.adapters is not None and uses_adapters(chunks)

    def _decode_inputs(self, packed: np.ndarray[Any, Any], chunks: Sequence[ScheduledChunk], size: int) -> Tensor:
        """Copy the inputs of a decode step to the device."""
        return self._step_inputs(packed, chunks, size)

    def _step_inputs(self, packed: np.ndarray[Any, Any], chunks: Sequence[ScheduledChunk], size: int) -> Tensor:
        """Copy the inputs of a step of `size` tokens to the device, and what follows them."""
        return self._to_device(np.concatenate((packed, self._pack_tiles(chunks, size))))

    def _pack_tiles(self, chunks: Sequence[ScheduledChunk], size: int) -> np.ndarray[Any, Any]:
        """Return the tokens of a step that have adapters, as `LoraTiles` packs them; empty if none has one."""
        if self.adapters is None or not uses_adapters(chunks):
            return np.empty(0, dtype=np.int64)
        return LoraTiles.pack(self.adapters.token_indices(chunks), size, self.adapters.max_loras)

    def _empty_extra(self, size: int, extended: bool) -> np.ndarray[Any, Any]:
        """Return what follows the inputs of a step that is captured."""
        if not extended:
            return np.empty(0, dtype=np.int64)
        assert self.adapters is not None
        return LoraTiles.pack(np.empty(0, dtype=np.int64), size, self.adapters.max_loras)

    def _hidden(self, embedded: Tensor, attend: Attend, extra: Tensor, active: Tensor | None) -> Tensor:
        """Run the layers; `extra` is what follows the inputs."""
        return self.network.hidden(embedded, attend, _split_tiles(extra, len(embedded)), active)

    def _captured_graph(self, size: int, bound: int, extended: bool = False) -> _Graph:
        captured = self._captured_extended if extended else self._captured
        if (size, bound) not in captured:
            inputs = np.zeros((3, size), dtype=np.int64)
            inputs[0] = self.max_num_seqs
            values = self._to_device(np.concatenate((inputs.ravel(), self._empty_extra(size, extended))))
            forward = partial(self._forward_decode, size=size, bound=bound)
            captured[size, bound] = self._capture(values, forward)
        return captured[size, bound]

    def _capture(self, inputs: Tensor, forward: Callable[[Tensor], tuple[Tensor, Tensor]]) -> _Graph:
        for _ in range(2):  # compile and autotune before the capture
            forward(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            tokens, logits = forward(inputs)
        return _Graph(graph, inputs, tokens, logits)

    def _forward_decode(self, values: Tensor, size: int, bound: int) -> tuple[Tensor, Tensor]:
        """Run a decode step on the device, with sequences of at most `bound` tokens; return tokens [size] and logits
        [size, vocabulary]."""
        from smelt.kernels.gpu.fused_ops import argmax_tokens

        slots, seq_lens, token_ids = values[: 3 * size].view(3, size)
        attend = self.pages.decode_attention(slots, seq_lens, self.network, bound)
        embedded = self.network.embed(token_ids, slots, self._last_tokens)
        hidden = self._hidden(embedded, attend, values[3 * size :], self._active(slots))
        logits = self.network.logits(hidden)
        return argmax_tokens(logits, slots, self._last_tokens), logits

    def _run_prefill(self, chunks: list[ScheduledChunk]) -> tuple[Tensor, Tensor]:
        """Compute prompt chunks, padded to a captured number of tokens; return tokens and logits of those that give
        one."""
        tokens, rows = _build_token_inputs(chunks), sampling_indices(chunks)
        size = next(size for size in PREFILL_SIZES if size >= tokens.shape[1])
        packed = PrefillInputs.pack(tokens, chunks, rows, size, self.max_num_seqs)
        values = self._step_inputs(packed, chunks, size)
        if self.cuda_graphs:
            captured = self._captured_prefill_graph(size, self._is_extended(chunks))
            first_tokens, logits = captured.replay(values)
        else:
            first_tokens, logits = self._forward_prefill(values, size)
        return first_tokens[: len(rows)], logits[: len(rows)]

    def _captured_prefill_graph(self, size: int, extended: bool = False) -> _Graph:
        captured = self._captured_extended_prefill if extended else self._captured_prefill
        if size not in captured:
            tokens = np.zeros((3, 0), dtype=np.int64)
            packed = PrefillInputs.pack(tokens, [], [], size, self.max_num_seqs)
            values = np.concatenate((packed, self._empty_extra(size, extended)))
            captured[size] = self._capture(self._to_device(values), lambda values: self._forward_prefill(values, size))
        return captured[size]

    def _forward_prefill(self, values: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Run a prefill step on the device; return tokens and logits of the rows, padded."""
        from smelt.kernels.gpu.fused_ops import argmax_tokens

        inputs, rest = PrefillInputs.split(values, size)
        assert isinstance(self.pages, PagedGpuPages)
        attend = self.pages.prefill_attention(inputs, self.network)
        embedded = self.network.embed(inputs.token_ids, inputs.slots, self._last_tokens)
        hidden = self._hidden(embedded, attend, rest, self._active(inputs.slots))
        logits = self.network.logits(hidden[inputs.logits_rows])
        return argmax_tokens(logits, inputs.logits_slots, self._last_tokens), logits

    def _active(self, slots: Tensor) -> Tensor | None:
        """Return which tokens are not padding, if the network has experts, which need to know."""
        return slots != self.max_num_seqs if self.network.has_experts else None

    def _run_mixed(self, batch: ScheduledBatch) -> InflightBatch:
        """Run a step with prompt chunks, behind decode tokens if any, kernel by kernel."""
        chunks, requests = batch.chunks, sampled_requests(batch.chunks)
        token_ids, slots, positions = self._to_device(_build_token_inputs(chunks))
        rows = self._to_device(np.array(sampling_indices(chunks), dtype=np.int64))
        prompt_rows = self._to_device(np.array(prompt_logits_indices(chunks), dtype=np.int64))
        extra = self._step_inputs(np.empty(0, dtype=np.int64), chunks, len(slots))
        embedded = self.network.embed(token_ids, slots, self._last_tokens)
        hidden = self._hidden(embedded, self._mixed_attention(chunks, slots, positions), extra, None)
        logprobs = compute_prompt_logprobs(chunks, lambda part: self.network.logits(hidden[prompt_rows[part]]))
        if not requests:
            return InflightBatch(batch, requests, None, logprobs)
        output = sample(self.network.logits(hidden[rows]), requests, self.eos_token_ids)
        self._last_tokens[slots[rows]] = output.tokens
        return InflightBatch(batch, requests, output, logprobs)

    def _mixed_attention(self, chunks: list[ScheduledChunk], slots: Tensor, positions: Tensor) -> Attend:
        """Return attention that uses the decode kernel for single tokens: it reads keys once per head group."""
        count = min(sum(self.pages.is_decode(chunk) for chunk in chunks), CAPTURE_SIZES[-1])
        if not count:
            return self.pages.varlen_attention(chunks, slots, positions, self.network)
        decode = self.pages.decode_attention(slots[:count], positions[:count] + 1, self.network, self.max_model_len)
        if count == len(chunks):
            return decode
        prefill = self.pages.varlen_attention(chunks[count:], slots[count:], positions[count:], self.network)
        return lambda qkv, part: torch.cat((decode(qkv[:count], part), prefill(qkv[count:], part)))

    def _to_device(self, values: np.ndarray[Any, Any]) -> Tensor:
        """Copy an array to the device asynchronously."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor.clone()


def _decode_sizes(extended: bool) -> tuple[int, ...]:
    return EXTENDED_CAPTURE_SIZES if extended else CAPTURE_SIZES


def _split_tiles(values: Tensor, size: int) -> LoraTiles | None:
    """View the end of a step's inputs as tiles; None if there is nothing: no token has an adapter."""
    return LoraTiles.split(values, size) if len(values) else None


def _fits_prefill(chunks: Sequence[ScheduledChunk]) -> bool:
    """Return whether one graph holds these chunks."""
    return len(chunks) <= MAX_PREFILL_CHUNKS and sum(chunk.count for chunk in chunks) <= PREFILL_SIZES[-1]


def _is_long(chunk: ScheduledChunk) -> bool:
    """Return whether attention of a chunk takes other tiles than the captured ones, or the decode kernel."""
    seq_len = chunk.start + chunk.count
    return (chunk.count >= 512 and seq_len >= 2048) or (chunk.count == 1 and seq_len >= 4096)


def _decode_values(request: Request, position: int) -> tuple[int, int, int]:
    """Return a request's slot, its length including `position`, and the token there, if the host has it."""
    return request.slot, position + 1, known_token(request, position)


def known_token(request: Request, position: int) -> int:
    """Return the token at a position, or a placeholder if only the device has it."""
    return request.tokens[position] if position < len(request.tokens) else PLACEHOLDER_TOKEN_ID


def _build_token_inputs(chunks: list[ScheduledChunk]) -> np.ndarray[Any, Any]:
    """Return token ids (placeholders where only the device has them), slots and positions of a step, [3, tokens]."""
    tokens = np.empty((3, sum(chunk.count for chunk in chunks)), dtype=np.int64)
    offset = 0
    for chunk in chunks:
        token_ids = chunk.request.tokens[chunk.start : chunk.start + chunk.count]
        span = tokens[:, offset : offset + chunk.count]
        span[0] = [*token_ids, *[PLACEHOLDER_TOKEN_ID] * (chunk.count - len(token_ids))]
        span[1], span[2] = chunk.request.slot, np.arange(chunk.start, chunk.start + chunk.count)
        offset += chunk.count
    return tokens
