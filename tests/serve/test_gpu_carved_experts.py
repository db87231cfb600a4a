"""Feed-forwards carved into experts in the GPU runner: the tokens of transformers' generation.

On a CUDA device with CUDA graphs, elsewhere under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (before anything imports Triton)

from smelt.models.carved_experts import LayerChannels, carved_layers
from smelt.runtime.gpu_experts import ExpertLoader, slots_reason
from smelt.serve.engine import factory
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.routed_runner import TokenRouter
from smelt.serve.engine.sampling_params import SamplingParams
from tests.carved import CHANNELS, carved
from tests.serve.gpu_runner import small_tiles  # noqa: F401  (a fixture)
from tests.serve.test_routed_engine import SMALL, expected

UNEVEN = LayerChannels(tuple(range(5)), (tuple(range(5, 8)), tuple(range(5, 48)), tuple(range(8, 30))))
_PROMPTS = [[(7 * i + 3) % 90 + 5 for i in range(19)], [(5 * i + 11) % 90 + 5 for i in range(9)], [50, 60], [70]]


@pytest.fixture(autouse=True)
def _gpu_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the GPU runner also without a CUDA device."""
    monkeypatch.setattr(factory._ResolvedConfig, "runs_fused", True)


@pytest.mark.parametrize("case", ["in chunks", "two at a time", "preempted", "quantized KV cache"])
def test_answers_are_those_of_transformers(case: str) -> None:
    """Layers differ in the widths of their experts; the first token of a prompt of one has no step before it."""
    options: dict[str, Any] = {
        "in chunks": {"prefill_chunk_size": 4, "max_num_batched_tokens": 8},
        "two at a time": {"max_num_batched_tokens": 2}, "quantized KV cache": {"kv_cache_dtype": "int8"},
        "preempted": {"kv_cache_bytes": 11 * 4 * 3 * 2 * 2 * 8 * 4},
    }[case]  # fmt: skip
    model = carved(channels=[CHANNELS, UNEVEN, CHANNELS])
    wanted = [expected(model, prompt, 5) for prompt in _PROMPTS]
    model.network.to(DEVICE)
    engine = Engine(model, **{**SMALL, **options})
    assert engine.backend.startswith("fused-gpu")
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    steps, launch = [], engine.runner.launch

    def note(batch: Any) -> Any:
        steps.append([(chunk.request, chunk.start, chunk.start + chunk.count) for chunk in batch.chunks])
        return launch(batch)

    engine.runner.launch = note  # type: ignore[method-assign]
    requests = [engine.submit(prompt, sampling)[0] for prompt in _PROMPTS]
    while engine.busy:
        engine.step()
    assert [request.output for request in requests] == wanted
    TokenRouter(model).route(requests)
    uses = [{expert for request, *span in step for expert in request.expert_routes[slice(*span)]} for step in steps]
    assert engine.state()["expert_uses"] == sum(map(len, uses)) > len(steps)  # so that wrong routes would be noticed
    assert (engine.state()["preemptions"] > 0) == (case == "preempted")


def test_padding_uses_no_expert() -> None:
    model = carved()
    model.network.to(DEVICE)
    runner: Any = Engine(model, **SMALL).runner
    runner._count_uses(torch.tensor([0, 2, 0], device=DEVICE), torch.tensor([True, False, True], device=DEVICE))
    assert runner.expert_state()["expert_uses"] == 1


def test_prompts_in_the_prefix_cache_are_routed_too() -> None:
    """Only the last token of a prompt is computed again, in a decode step: its route needs the tokens before it."""
    model = carved()
    prompts = [[*prompt, 80 + index] for index, prompt in enumerate(_PROMPTS[:2])]
    wanted = [expected(model, prompt, 3) for prompt in prompts]
    model.network.to(DEVICE)
    engine = Engine(model, **SMALL)
    sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    for _ in range(2):
        requests = [engine.submit(prompt, sampling)[0] for prompt in prompts]
        while engine.busy:
            engine.step()
        assert [request.output for request in requests] == wanted


@pytest.mark.parametrize("policy", ["belady", "lru"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 4, "max_num_batched_tokens": 8}])
@pytest.mark.parametrize("prefetch", [True, False])
def test_experts_take_turns_in_slots(
    policy: str, options: dict[str, Any], prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps need one to three experts, of which two have slots; what a step loads runs in the same step."""
    if DEVICE == "cpu":  # a graph could not be captured with this
        begin = ExpertLoader.begin

        def check(loader: ExpertLoader, experts: torch.Tensor, loaded: torch.Tensor, placed: torch.Tensor) -> None:
            kept = placed[placed >= 0].tolist()
            assert len(set(kept)) == len(kept), "copies of two experts to one slot have no order"
            begin(loader, experts, loaded, placed)

        monkeypatch.setattr(ExpertLoader, "begin", check)
    model = carved(channels=[CHANNELS, UNEVEN, CHANNELS])
    wanted = [expected(model, prompt, 8) for prompt in _PROMPTS]
    model.network.to(DEVICE)
    engine = Engine(model, expert_slots=2, expert_policy=policy, expert_prefetch=prefetch, **{**SMALL, **options})
    assert engine.backend.startswith("fused-gpu") and engine.backend.endswith("2 of 3 experts at a time")
    layers = carved_layers(model.network)
    assert all(parameter.device.type == "cpu" for layer in layers for parameter in layer.experts.parameters())
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    before, kinds = engine.state(), set()
    plan = engine.runner._plan  # type: ignore[attr-defined]

    def note(chunks: Any) -> None:
        plan(chunks)
        kinds.add(tuple(access.loads for access in engine.runner._accesses))  # type: ignore[attr-defined]

    engine.runner._plan = note  # type: ignore[attr-defined]
    requests = [engine.submit(prompt, sampling)[0] for prompt in _PROMPTS]
    while engine.busy:
        engine.step()
    assert [request.output for request in requests] == wanted
    state = engine.state()
    hits, misses = (state[f"expert_{name}"] - before[f"expert_{name}"] for name in ("hits", "misses"))
    assert hits + misses == state["expert_uses"] and hits and misses
    widest = [max(widths) for widths in ((8, 8, 8), (3, 43, 22), (8, 8, 8))]
    assert state["expert_bytes_loaded"] == misses * 3 * sum(widest) * 32 * 4
    assert {False in kind for kind in kinds} == {True in kind for kind in kinds} == {True, False}, kinds


def test_quantized_experts_in_slots_run_eagerly() -> None:
    model = carved()
    for layer in carved_layers(model.network):
        for expert in layer.experts:
            expert.gate_proj.bias = torch.nn.Parameter(torch.zeros(expert.gate_proj.out_features))
    assert slots_reason(model) == "its experts are quantized or have biases"
    assert slots_reason(carved()) is None
