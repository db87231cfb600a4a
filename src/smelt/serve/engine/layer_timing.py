"""Time linear layers as the engine runs them for a workload: quantized against unquantized ones, or several widths.

Layers that share an input are merged where the engine merges them. They run compiled on CPU, in a CUDA graph on a GPU,
and as modules where the network is not compiled. Experts of a mixture run as one grouped product on a GPU. Weights are
random, because speed depends on shapes and formats only, and enough copies of them run in turn to exceed the caches: in
a model, each layer comes from memory.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from smelt.measure.clock import stopwatch
from smelt.measure.machine import cpu_model
from smelt.models.model import Model
from smelt.models.quantization_scheme import LinearGroupSpec, QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.models.quantized_network import dequantize_without_kernel
from smelt.runtime import cpu, decoder
from smelt.serve.engine.config import EngineConfig
from smelt.serve.engine.throughput import RequestWorkload, estimate_batch_sizes

CACHE_BYTES = {"cpu": 2**26, "cuda": 2**28}  # more than the last-level cache holds
MAX_COPIES = 64  # of the layers; small models stay in the cache when they are served, too
MAX_PRODUCTS = 2**31  # multiply-adds of one timed call, unless a single copy of the layers takes more
MIN_ROUNDS, MIN_SECONDS = 3, 0.3  # of the timing of one number of tokens

Layers = Sequence[nn.Module]
MakeCall = Callable[[int, int], Callable[[], object]]  # (tokens, number of copies) -> a call that runs them


class LayerTimer:
    """Compares quantized with unquantized layers of a model on a device; equal layers are timed once."""

    def __init__(self, model: Model, workload: RequestWorkload, device: str) -> None:
        self.device = torch.device(device)
        positions = getattr(model.network.config.get_text_config(), "max_position_embeddings", None)
        workload = workload if positions is None else workload.fit(positions)
        self.steps = count_steps(workload, estimate_batch_sizes(model, workload, self.device))
        self._dtype = model.network.dtype
        self._compiled = _is_compiled(model, self.device)
        self._ratios: dict[LinearGroupSpec, float] = {}

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else cpu_model()

    @torch.no_grad()
    def time_ratio(self, spec: LinearGroupSpec) -> float:
        """Return the time of quantized layers relative to unquantized ones, over all steps of the workload."""
        if spec not in self._ratios:
            quantized, dense = self._seconds([spec, replace(spec, scheme=None)])
            self._ratios[spec] = quantized / dense
        return self._ratios[spec]

    @torch.no_grad()
    def mean_seconds(self, specs: Sequence[LinearGroupSpec]) -> list[float]:
        """Return the time of each group of layers, a mean over all steps of the workload; they are timed in turns."""
        return [total / sum(self.steps.values()) for total in self._seconds(specs)]

    def _seconds(self, specs: Sequence[LinearGroupSpec]) -> list[float]:
        """Return the time of each group of layers over all steps of the workload."""
        made = [self._prepare(random_layers(spec, self._dtype, self.device), spec) for spec in specs]
        totals = [0.0] * len(specs)
        for tokens, count in self.steps.items():
            shares = [max(1, round(tokens * spec.token_share)) for spec in specs]
            limits = [_max_copies(spec, share) for spec, share in zip(specs, shares, strict=True)]
            sizes = [min(copies, limit) for (copies, _), limit in zip(made, limits, strict=True)]
            calls = [make(share, size) for (_, make), share, size in zip(made, shares, sizes, strict=True)]
            for index, seconds in enumerate(time_alternately(calls, self.device)):
                totals[index] += count * seconds / sizes[index]
        return totals

    def _prepare(self, layers: Layers, spec: LinearGroupSpec) -> tuple[int, MakeCall]:
        """Return the number of copies of the layers, and what makes a call that runs some of them."""
        size = sum(tensor.nbytes for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))
        number = min(MAX_COPIES, math.ceil(CACHE_BYTES[self.device.type] / size))
        copies = [copy.deepcopy(layers) for _ in range(number)]
        if self._compiled and self.device.type == "cuda" and spec.token_share < 1.0:
            return len(copies), _expert_calls(copies, self._dtype, self.device)
        if self._compiled and self.device.type == "cuda":
            return len(copies), _graph_calls(copies, self._dtype, spec.fused_input)
        if self._compiled and all(map(cpu.has_kernel, layers)):
            dtype = torch.bfloat16 if self._dtype == torch.bfloat16 else torch.float32
            return len(copies), lambda tokens, count: cpu.linear_program(copies[:count], tokens, dtype)
        return len(copies), _module_calls(copies, self._dtype, self.device)


def count_steps(workload: RequestWorkload, batch_sizes: Sequence[int]) -> Mapping[int, float]:
    """Count the steps by their tokens when the workload runs once at each batch size: decode steps, and full chunks of
    prompts."""
    requests = {size: [workload.lengths[i % len(workload.lengths)] for i in range(size)] for size in batch_sizes}
    prompts = {size: sum(prompt for prompt, _ in batch) for size, batch in requests.items()}
    chunk = min(EngineConfig().max_num_batched_tokens, max(prompts.values()))
    steps: Counter[int] = Counter()
    for size, batch in requests.items():
        steps[size] += sum(output for _, output in batch) / size  # type: ignore[assignment]
        steps[chunk] += prompts[size] / chunk  # type: ignore[assignment]
    return steps


def random_layers(spec: LinearGroupSpec, dtype: torch.dtype, device: torch.device) -> Layers:
    """Return layers of a group with random weights, without using the global random numbers."""
    generator = torch.Generator(device).manual_seed(0)
    layers: list[nn.Module] = []
    for rows in spec.out_features:
        weight = torch.randn(rows, spec.in_features, generator=generator, device=device) / math.sqrt(spec.in_features)
        bias = torch.zeros(rows, dtype=dtype, device=device) if spec.bias else None
        scheme = spec.scheme
        layers.append(_linear(weight, bias, dtype) if scheme is None else _quantize(weight, bias, scheme, dtype))
    return layers


def _quantize(weight: Tensor, bias: Tensor | None, scheme: QuantizationScheme, dtype: torch.dtype) -> QuantizedLinear:
    layer = QuantizedLinear.from_quantized(scheme.weight.quantize(weight), scheme, bias=bias, dtype=dtype)
    if scheme.static:
        layer.set_static_input_scale(torch.full((weight.shape[1],), 4.0, device=weight.device))
    return layer


def _linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return layer


def time_alternately(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the least seconds of each call, timed in turns; whatever else the machine does only adds to them."""
    clock = stopwatch(device)
    for call in calls:
        clock(call)
    least, rounds, total = [math.inf] * len(calls), 0, 0.0
    while rounds < MIN_ROUNDS or total < MIN_SECONDS:
        readings = [clock(call) for call in calls]
        least = [min(pair) for pair in zip(least, readings, strict=True)]
        rounds, total = rounds + 1, total + sum(readings)
    return least


def _is_compiled(model: Model, device: torch.device) -> bool:
    """Whether the engine compiles the unquantized network for this device."""
    if device.type == "cuda":
        return decoder.unsupported_reason(model) is None
    return cpu.unsupported_reason(model) is None


def _max_copies(spec: LinearGroupSpec, tokens: int) -> int:
    return max(1, MAX_PRODUCTS // (tokens * spec.in_features * sum(spec.out_features)))


def _graph_calls(copies: Sequence[Layers], dtype: torch.dtype, fused_input: bool) -> MakeCall:
    from smelt.runtime.gpu import FusedLinear, linear_graph  # needs Triton

    linears = [FusedLinear(layers, dtype) for layers in copies]
    return lambda tokens, count: linear_graph(linears[:count], tokens, fused_input)


def _expert_calls(copies: Sequence[Layers], dtype: torch.dtype, device: torch.device) -> MakeCall:
    """Run the copies as the experts of a mixture, if there is a grouped kernel."""
    from smelt.runtime.gpu_experts import experts_graph, stack_linears, unstackable_reason  # needs Triton

    dequantize_without_kernel(nn.ModuleList(nn.ModuleList(layers) for layers in copies), dtype)
    if unstackable_reason(copies, dtype) is not None:
        return _module_calls(copies, dtype, device)
    width: int = copies[0][0].in_features  # type: ignore[assignment]
    product = stack_linears(copies, dtype)
    return lambda tokens, count: experts_graph(product, width, count, tokens, dtype)


def _module_calls(copies: Sequence[Layers], dtype: torch.dtype, device: torch.device) -> MakeCall:
    dequantize_without_kernel(nn.ModuleList(nn.ModuleList(layers) for layers in copies), dtype)

    def make_call(tokens: int, count: int) -> Callable[[], object]:
        width: int = copies[0][0].in_features  # type: ignore[assignment]
        x = torch.randn(tokens, width, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
        return lambda: [layer(x) for layers in copies[:count] for layer in layers]

    return make_call
