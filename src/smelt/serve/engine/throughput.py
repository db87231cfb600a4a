"""Throughput of a model in the engine that `smelt serve` uses: tokens per second and time to first token by batch size.

A module's forward says little about serving: the engine has other kernels, batches requests and captures its steps.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from smelt.errors import ConfigError
from smelt.measure.cost import count_bytes
from smelt.measure.machine import copy_bandwidth
from smelt.measure.memory import free_memory
from smelt.models.load import load, skeleton
from smelt.models.model import Model
from smelt.models.program_network import ProgramNetwork
from smelt.models.quantized import DEQUANTIZED, NO_BACKEND, QuantizedLinear
from smelt.serve.engine.attention import block_bytes
from smelt.serve.engine.config import EngineConfig
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.factory import CACHE_SHARE
from smelt.serve.engine.kv_dtype import resolve_kv_cache_dtype
from smelt.serve.engine.request import Request
from smelt.serve.engine.sampling_params import SamplingParams

STREAMS = (1, 8, 64)  # and the largest batch that fits
FEW_STREAMS = 8  # fewer are not limited by arithmetic
MAX_TRACE_REQUESTS = 100_000
Say = Callable[[str], None]


@dataclass(frozen=True)
class RequestWorkload:
    """The prompt and output tokens of requests, repeated as often as a batch needs."""

    name: str
    lengths: tuple[tuple[int, int], ...]

    @property
    def longest(self) -> int:
        return max(prompt + output for prompt, output in self.lengths)

    @property
    def fingerprint(self) -> str:
        """A short hash of the lengths, after the name."""
        return f"{self.name} {hashlib.sha256(repr(self.lengths).encode()).hexdigest()[:16]}"

    def fit(self, max_model_len: int) -> RequestWorkload:
        """Shorten the requests in proportion if the longest exceeds the model's context."""
        if self.longest <= max_model_len:
            return self
        share = max_model_len / self.longest
        shortened = [(max(1, int(prompt * share)), max(1, int(output * share))) for prompt, output in self.lengths]
        return RequestWorkload(f"{self.name}, shortened to {max_model_len} tokens", tuple(shortened))


WORKLOADS = {
    "chat": RequestWorkload("chat", ((512, 256),)),
    "long": RequestWorkload("long", ((16384, 512),)),
    "batch": RequestWorkload("batch", ((256, 256),)),
}


@dataclass(frozen=True)
class ThroughputRow:
    """One batch size. Requests arrive at once; `first_token_ms` is the median over them.

    `share_of_roofline` is the time to read the weights once, at the bandwidth of a large copy, over a decode step.
    """

    streams: int
    tokens_per_second: float
    first_token_ms: float
    decode_ms: float
    share_of_roofline: float
    complete: bool  # False: cut off, and extrapolated from the decode steps until then


@dataclass(frozen=True)
class Throughput:
    """A model in the engine, for one workload."""

    workload: str
    device: str
    backend: str
    layer_backends: dict[str, str]  # what computes each linear layer
    startup_seconds: float  # compile and capture
    copy_bandwidth: float  # bytes per second, the denominator of the roofline
    rows: tuple[ThroughputRow, ...]
    skipped: tuple[int, ...]  # batch sizes whose prompts alone would exceed the time limit

    @property
    def layers(self) -> dict[str, int]:
        """The number of linear layers by what computes them, most frequent first."""
        return dict(Counter(self.layer_backends.values()).most_common())

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "layers": self.layers}


def parse_workload(text: str) -> RequestWorkload:
    """Return a named workload, or that of a trace: JSON lines with `prompt_tokens` and `output_tokens`."""
    if text in WORKLOADS:
        return WORKLOADS[text]
    path = Path(text)
    if not path.is_file():
        raise ConfigError(f"there is no workload {text!r:.80}; use {', '.join(WORKLOADS)}, or the path of a trace.")
    lengths = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                lengths.append(_parse_request(line, f"{path}, line {number}"))
            if len(lengths) > MAX_TRACE_REQUESTS:
                raise ConfigError(f"{path} has more than {MAX_TRACE_REQUESTS:,} requests; cut it.")
    if not lengths:
        raise ConfigError(f"{path} has no request; write lines such as {_EXAMPLE}.")
    return RequestWorkload(path.name, tuple(lengths))


_EXAMPLE = '{"prompt_tokens": 512, "output_tokens": 256}'


def _parse_request(line: str, where: str) -> tuple[int, int]:
    try:
        request = json.loads(line[:10_000])
        lengths = request["prompt_tokens"], request["output_tokens"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{where} is no request of a trace; write {_EXAMPLE}.") from None
    if not all(type(length) is int and 0 < length <= 10**7 for length in lengths):
        raise ConfigError(f"{where}: the numbers of tokens must be positive integers.")
    return lengths


def measure_throughput(
    source: str, workload: RequestWorkload, *, device: str = "cpu", seconds: float = 60.0, seed: int = 0,
    streams: tuple[int, ...] | None = None, packed: bool = True, say: Say = lambda _: None,
) -> Throughput:  # fmt: skip
    """Load a model into an engine as `smelt serve` would, and time the workload at several batch sizes.

    All batch sizes together take about `seconds`, startup not counted: the larger ones are cut off or skipped on a slow
    device. Without `packed`, weights that are stored quantized are dequantized, as compression does with its source.
    """
    start = time.perf_counter()
    config = EngineConfig(device=device, max_model_len=_context(source, workload))
    config.check(Model(skeleton(source), source=source))  # before weights are read
    model = load(source, device=device, packed=packed)
    weights = _weight_bytes(model.network)  # an engine may rearrange them
    engine = Engine(model, config)
    workload = workload.fit(engine.max_model_len)
    engine.warmup(None if engine.model.device.type == "cuda" else [1])
    startup = time.perf_counter() - start
    bandwidth = copy_bandwidth(engine.model.device)
    pool = engine.pool
    sizes = streams or _batch_sizes(workload, pool.num_blocks, pool.block_size, engine.config.max_num_seqs)
    rows: list[ThroughputRow] = []
    skipped: list[int] = []
    prefill_rate, begin = math.inf, time.perf_counter()
    for position, size in enumerate(sizes):
        requests = [workload.lengths[i % len(workload.lengths)] for i in range(size)]
        left = seconds - (time.perf_counter() - begin)
        limit = left / (len(sizes) - position)
        if rows and sum(prompt for prompt, _ in requests) / prefill_rate > limit:
            skipped.append(size)
            continue
        say(f"timing {size} {'stream' if size == 1 else 'streams'}")
        row, prefill_rate = measure_batch(engine, requests, limit, seed + position, weights / bandwidth)
        rows.append(row)
    return Throughput(
        workload.name, str(engine.model.device), engine.backend, _layer_backends(engine), startup,
        bandwidth, tuple(rows), tuple(skipped),
    )  # fmt: skip


def _context(source: str, workload: RequestWorkload) -> int:
    """Return the context to serve the workload with: its own, or the model's if that is shorter."""
    positions = getattr(skeleton(source).config.get_text_config(), "max_position_embeddings", None)
    return workload.longest if positions is None else min(workload.longest, positions)


def estimate_batch_sizes(model: Model, workload: RequestWorkload, device: torch.device) -> tuple[int, ...]:
    """Return the batch sizes of the workload in an engine that is not started, with the memory that is free now."""
    config = EngineConfig()
    block_size = config.kv_cache.tokens_per_block
    dtype = resolve_kv_cache_dtype(model, None)
    blocks = int(CACHE_SHARE[device.type] * free_memory(device)) // block_bytes(
        model.anatomy, block_size, model.network.dtype, dtype
    )
    return _batch_sizes(workload, blocks, block_size, config.max_num_seqs)


def _batch_sizes(workload: RequestWorkload, num_blocks: int, block_size: int, max_num_seqs: int) -> tuple[int, ...]:
    """Return the usual batch sizes and the largest whose requests are all in the KV cache."""
    largest = max(1, min(max_num_seqs, num_blocks // -(-workload.longest // block_size)))
    return tuple(sorted({*(size for size in STREAMS if size < largest), largest}))


def measure_batch(
    engine: Engine, lengths: list[tuple[int, int]], limit: float, seed: int, read_seconds: float,
    adapters: Sequence[str | None] = (None,),
) -> tuple[ThroughputRow, float]:  # fmt: skip
    """Time one batch of requests, given as prompt and output tokens, for about `limit` seconds.

    `read_seconds` is the time to read all weights once; requests use the adapters in turn. Returns the row and the
    prompt tokens per second.
    """
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    requests: list[Request] = []
    for (prompt, output), adapter in zip(lengths, itertools.cycle(adapters), strict=False):
        tokens = torch.randint(engine.vocab_size, (prompt,), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        requests += engine.submit(tokens, sampling, adapter=adapter)
    waiting, first, steps, last = set(requests), list[float](), list[float](), start
    prefilled, complete = start, True
    while engine.busy:
        engine.step()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
        started = {request for request in waiting if request.output}
        first += [now - start] * len(started)
        waiting -= started
        if started:
            prefilled, steps = now, []  # decode steps are those after the last prompt
        complete = not engine.busy
        if not waiting and now - start > limit and len(steps) >= 4:
            break
    decoding = statistics.median(steps or [last - start])
    missing = max(request.sampling.max_tokens - len(request.output) for request in requests)  # type: ignore[operator]
    for request in requests:
        if not complete:
            engine.abort(request)
    while engine.busy:
        engine.step()
    elapsed = last - start + (0 if complete else missing * decoding)
    row = ThroughputRow(
        len(lengths), sum(output for _, output in lengths) / elapsed, 1e3 * statistics.median(first), 1e3 * decoding,
        read_seconds / decoding, complete,
    )  # fmt: skip
    return row, sum(prompt for prompt, _ in lengths) / (prefilled - start)


def _weight_bytes(network: nn.Module) -> int:
    """Return the bytes that a decode step reads: all weights, of the embeddings only a tied output layer's."""
    if isinstance(network, ProgramNetwork):
        return count_bytes(network)
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*network.parameters(), *network.buffers())}
    embeddings = network.get_input_embeddings().weight  # type: ignore[operator]
    output = network.get_output_embeddings()  # type: ignore[operator]
    tied = isinstance(output, nn.Linear) and output.weight is embeddings
    return sum(tensors.values()) - (0 if tied else embeddings.nbytes)


def _layer_backends(engine: Engine) -> dict[str, str]:
    """Return what computes each linear layer: its own kernel, or the program of the whole network."""
    backends: dict[str, str] = {}
    for path, module in engine.model.network.named_modules():
        if isinstance(module, QuantizedLinear):
            backends[path] = module.backend if module.backend != NO_BACKEND else engine.runner.backend
        elif isinstance(module, nn.Linear):
            backends[path] = f"dense {str(module.weight.dtype).removeprefix('torch.')}"
    return backends


def compare_throughput(new: Throughput, base: Throughput) -> list[dict[str, float]]:
    """Return, for every batch size that both have, how much faster the new model is: above 1 is faster."""
    return [
        {
            "streams": row.streams,
            "speedup": row.tokens_per_second / reference.tokens_per_second,
            "first_token_ratio": row.first_token_ms / reference.first_token_ms,
        }
        for row, reference in paired_rows(new, base)
    ]


def paired_rows(new: Throughput, base: Throughput) -> list[tuple[ThroughputRow, ThroughputRow]]:
    """Return the rows of the batch sizes that both models have."""
    references = {row.streams: row for row in base.rows}
    return [(row, references[row.streams]) for row in new.rows if row.streams in references]


def explain_slowdown(
    new: Throughput, base: Throughput, tolerance: float = 0.02, *, guarded: bool = False
) -> str | None:
    """Say in one sentence where the new model is slower than the base model, why, and what helps; None if nowhere.

    `guarded`: the new model was quantized with `guard: speed`, which is then no remedy.
    """
    slower = [row for row in compare_throughput(new, base) if row["speedup"] < 1 - tolerance]
    if not slower:
        return None
    where = ", ".join(f"{row['speedup']:.2f}x with {row['streams']:.0f}" for row in slower)
    sentence = f"slower than the base model ({where} at a time): "
    if DEQUANTIZED in new.layers:
        return sentence + (
            f"{new.layers[DEQUANTIZED]} layers have no kernel for their format on this device; choose another format."
        )
    if new.backend != base.backend:
        return sentence + f"it runs as {new.backend!r}, the base model as {base.backend!r}."
    if any(not name.startswith("dense") for name in new.layers):
        guard = "" if guarded else "leave slower layers unquantized with `guard: speed`, "
        if min(row["streams"] for row in slower) < FEW_STREAMS:  # there, time is the bytes that are read
            return sentence + (
                f"this device multiplies these packed weights more slowly than dense ones; {guard}or choose another "
                "format (`smelt bench --engine` compares two)."
            )
        return sentence + (
            "with many tokens per step, dequantizing weights costs more than reading fewer bytes saves; quantize the "
            f"activations too (`input_activations: int8` or fp8-e4m3), {guard}or serve smaller batches."
        )
    return sentence + (
        "no layer is quantized; if it was pruned with `ffn_multiple` or `head_multiple`, leave them out, so that "
        "widths suit the kernels of this device."
    )
