"""Timing of quantized layers against unquantized ones: which steps count, and that a slow kernel shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from smelt.kernels.cpu.build import load_library
from smelt.kernels.cpu.kernels import FloatLinear
from smelt.kernels.cpu.program import Program
from smelt.models.experts import split_experts
from smelt.models.model import Model
from smelt.models.quantization_scheme import LinearGroupSpec, QuantizationScheme
from smelt.numerics.catalog import get_format
from smelt.numerics.integer import Integer
from smelt.serve.engine import layer_timing
from smelt.serve.engine.layer_timing import LayerTimer, count_steps, random_layers, time_alternately
from smelt.serve.engine.throughput import RequestWorkload, estimate_batch_sizes
from tests.mixtures import fused
from tests.tiny import BUILDS

SCHEME = QuantizationScheme(Integer(16, "float16", 4, False))
WORKLOAD = RequestWorkload("small", ((8, 4),))
SLOW, FAST = LinearGroupSpec(48, (32,), False, SCHEME), LinearGroupSpec(32, (48, 48), False, SCHEME)
REPEATS = 300  # of the product in a kernel that is made slow
needs_library = pytest.mark.skipif(load_library() is None, reason="needs the compiled CPU kernels")


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_timing, "MAX_COPIES", 2)
    monkeypatch.setattr(layer_timing, "MIN_SECONDS", 0.0)


def timer(name: str, monkeypatch: pytest.MonkeyPatch) -> LayerTimer:
    monkeypatch.setattr(layer_timing, "estimate_batch_sizes", lambda *_: (1, 4))
    return LayerTimer(Model(BUILDS[name]()), WORKLOAD, "cpu")


def test_steps_of_a_workload() -> None:
    """At each batch size, all output tokens are decoded and all prompts are read in chunks of 2,048 tokens."""
    assert count_steps(RequestWorkload("chat", ((512, 256),)), (1, 8)) == {1: 256, 8: 256, 2048: 0.25 + 2}
    assert count_steps(RequestWorkload("trace", ((10, 3), (2, 5))), (2,)) == {2: 4, 12: 1}


def test_batch_sizes_are_those_whose_kv_cache_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = Model(BUILDS["llama"]()), torch.device("cpu")
    request = 2 * 3 * 16 * 2 * 8 * 4  # keys and values, layers, tokens, KV heads, head_dim, bytes
    for requests, expected in ((5, (1, 5)), (64, (1, 8, 64)), (10**6, (1, 8, 64, 256)), (0, (1,))):
        monkeypatch.setattr(
            "smelt.serve.engine.throughput.free_memory", lambda _, n=requests: request * (n + 0.5) / 0.3
        )
        assert estimate_batch_sizes(model, WORKLOAD, device) == expected


def test_requests_longer_than_the_context_are_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_timing, "estimate_batch_sizes", lambda *_: (1,))
    steps = LayerTimer(Model(BUILDS["llama"]()), RequestWorkload("long", ((960, 64),)), "cpu").steps
    assert steps == {1: 8, 120: 1}  # 128 positions


@pytest.mark.parametrize("quantized", [True, False])
def test_random_layers_leave_the_random_state_alone(quantized: bool) -> None:
    scheme = QuantizationScheme(get_format("int8"), get_format("int8"), static=False)
    before = torch.get_rng_state()
    layers = random_layers(
        LinearGroupSpec(32, (16, 8), True, scheme if quantized else None), torch.float32, torch.device("cpu")
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert [layer(torch.ones(2, 32)).shape for layer in layers] == [(2, 16), (2, 8)]


def test_calls_are_timed_in_turns_and_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    readings = iter([9.0, 9.0, 3.0, 5.0, 2.0, 6.0, 4.0, 4.5])

    def clock(call: Callable[[], object]) -> float:
        call()
        return next(readings)

    monkeypatch.setattr(layer_timing, "stopwatch", lambda _: clock)
    calls: Sequence[Callable[[], object]] = [lambda: called.append("a"), lambda: called.append("b")]
    assert time_alternately(calls, torch.device("cpu")) == [2.0, 4.5]
    assert "".join(called) == "abababab"


def test_the_times_of_all_steps_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of tokens counts as often as the workload has such steps; a call may run several copies."""
    seconds = {1: [2.0, 1.0], 4: [3.0, 4.0], 32: [10.0, 20.0]}  # of one copy: quantized, dense
    copies_seen = []

    def fake(calls: Any, device: torch.device) -> list[float]:
        (tokens, quantized), (_, dense) = calls[0](), calls[1]()
        copies_seen.append((quantized, dense))
        return [copies * reading for copies, reading in zip((quantized, dense), seconds[tokens], strict=True)]

    monkeypatch.setattr(layer_timing, "_module_calls", lambda *_: lambda tokens, count: lambda: (tokens, count))
    monkeypatch.setattr(layer_timing, "time_alternately", fake)
    monkeypatch.setattr(layer_timing, "CACHE_BYTES", {"cpu": 4 * 32 * 48})
    gpt2 = timer("gpt2", monkeypatch)
    assert gpt2.steps == {1: 4, 4: 4, 32: 1.25}
    assert gpt2.time_ratio(SLOW) == (4 * 2 + 4 * 3 + 1.25 * 10) / (4 * 1 + 4 * 4 + 1.25 * 20)
    assert copies_seen == [(2, 1)] * 3  # the cache holds one dense layer, and more than two quantized ones


@needs_library
def test_a_slow_kernel_shows_in_the_compiled_program(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Program.packed

    def slow(self: Program, plan: Any, *arguments: Any) -> None:
        for _ in range(REPEATS if (plan.rows, plan.columns) == (32, 48) else 1):
            packed(self, plan, *arguments)

    monkeypatch.setattr(Program, "packed", slow)
    llama = timer("llama", monkeypatch)
    assert llama.time_ratio(SLOW) > 10 > llama.time_ratio(FAST) > 0
    calls = []
    monkeypatch.setattr(layer_timing, "time_alternately", calls.append)
    assert llama.time_ratio(SLOW) > 10 and not calls  # timed once


@needs_library
def test_a_slow_kernel_shows_in_a_network_that_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FloatLinear.run

    def slow(self: FloatLinear, x: torch.Tensor, packed: Any, *arguments: Any) -> torch.Tensor:
        for _ in range(REPEATS if (packed.rows, packed.columns) == (32, 48) else 0):
            run(self, x, packed, *arguments)
        return run(self, x, packed, *arguments)

    monkeypatch.setattr(FloatLinear, "run", slow)
    gpt2 = timer("gpt2", monkeypatch)
    assert gpt2.time_ratio(SLOW) > 10 > gpt2.time_ratio(FAST) > 0


def test_a_layer_without_a_kernel_is_timed_as_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantized at load: as fast as the unquantized one, and far from dequantizing in every step."""
    scheme = QuantizationScheme(get_format("int4"), hadamard=True)
    assert 0 < timer("llama", monkeypatch).time_ratio(LinearGroupSpec(32, (32,), False, scheme)) < 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("inputs", [None, "int8", "fp8-e4m3"])
def test_layers_are_timed_in_cuda_graphs(inputs: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_timing, "estimate_batch_sizes", lambda *_: (1, 64))
    model = Model(BUILDS["llama"]().to("cuda", torch.bfloat16))
    cuda = LayerTimer(model, WORKLOAD, "cuda")
    weight = Integer(128, "float16", 4, True) if inputs is None else get_format(inputs)
    scheme = QuantizationScheme(weight, None if inputs is None else get_format(inputs))
    for spec in (
        LinearGroupSpec(4096, (4096, 1024, 1024), False, scheme),
        LinearGroupSpec(4096, (4096,), False, scheme, fused_input=False),
    ):
        assert 0.1 < cuda.time_ratio(spec) < 10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_experts_are_timed_as_one_grouped_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 4 bits are read faster than those of 16; those of 5 bits have no grouped kernel and run as modules."""
    monkeypatch.setattr(layer_timing, "estimate_batch_sizes", lambda *_: (16,))
    monkeypatch.setattr(layer_timing, "MAX_COPIES", 64)
    monkeypatch.setattr(layer_timing, "MIN_SECONDS", 0.05)
    model = Model(split_experts(fused("qwen3-moe")).to("cuda", torch.bfloat16))
    measured = LayerTimer(model, WORKLOAD, "cuda")
    four_bits = LinearGroupSpec(2048, (768, 768), False, QuantizationScheme(get_format("int4/128@float16")), 0.25)
    assert measured.time_ratio(four_bits) < 0.9
    five_bits = LinearGroupSpec(2048, (768, 768), False, QuantizationScheme(get_format("int5/128")), 0.25)
    assert measured.time_ratio(five_bits) > measured.time_ratio(four_bits)
