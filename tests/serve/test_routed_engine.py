"""The engine serves carved experts: the tokens of transformers' generation alone, in any batch, in chunks, after
preemption, with experts in slots and with tokens grouped by expert; the counts are those of what happened.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.errors import ConfigError, ModelError, RequestError
from smelt.models.carved_experts import LayerChannels, carved_layers, carved_routes_of
from smelt.models.model import Model
from smelt.models.quantized import STATIC_SCALE, STATIC_ZERO, quantized_layers
from smelt.numerics.catalog import get_format
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.request import Request
from smelt.serve.engine.routed_runner import RoutedRunner
from smelt.serve.engine.sampling_params import SamplingParams
from smelt.serve.server.metrics import ServerMetrics
from smelt.serve.server.settings import ServeConfig
from tests.carved import CHANNELS, carved
from tests.tiny import BUILDS

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SMALL: dict[str, Any] = {"block_size": 4, "max_model_len": 96, "kv_cache_bytes": 10**7}


def prompts(count: int = 6, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    beginning = [rng.randrange(3, 99) for _ in range(12)]
    return [
        beginning[: rng.randrange(12)] + [rng.randrange(3, 99) for _ in range(rng.randrange(1, 20))]
        for _ in range(count)
    ]


def expected(model: Model, prompt: list[int], count: int = 12) -> list[int]:
    network = copy.deepcopy(model.network)
    network.set_attn_implementation("sdpa")
    output = network.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return list(output[0, len(prompt) :].tolist())


def answers(engine: Engine, texts: list[list[int]]) -> list[list[int]]:
    requests = [engine.submit(text, GREEDY)[0] for text in texts]
    while engine.busy:
        engine.step()
    return [request.output for request in requests]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"compiled": False},
    "in chunks": {"prefill_chunk_size": 3, "max_num_batched_tokens": 8},
    "eager, in chunks": {"compiled": False, "prefill_chunk_size": 3, "max_num_batched_tokens": 8},
    "fewer tokens than requests": {"max_num_batched_tokens": 4, "prefill_chunk_size": 4},
    "no grouping": {"max_num_batched_tokens": 4, "expert_batching": False},
    "one slot": {"expert_slots": 1},
    "two slots": {"expert_slots": 2, "max_num_batched_tokens": 5},
    "two slots, no grouping": {"expert_slots": 2, "expert_batching": False},
    "loaded when needed": {"expert_slots": 2, "expert_prefetch": False, "expert_policy": "lru"},
    "random": {"expert_slots": 2, "expert_policy": "random"},
    "preempted": {"kv_cache_bytes": 24 * 4 * 3 * 2 * 2 * 8 * 4},
    "quantized KV cache": {"kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_transformers(case: str) -> None:
    model = carved()
    wanted = [expected(model, prompt) for prompt in prompts()]
    engine = Engine(model, **{**SMALL, **CASES[case]})
    compiled = not {"compiled", "expert_slots"} & set(CASES[case])
    assert engine.backend.startswith("compiled-cpu" if compiled else "eager")
    got = answers(engine, prompts())
    if case == "quantized KV cache":
        assert sum(a == b for a, b in zip(got, wanted, strict=True)) >= 4
    else:
        assert got == wanted
    if case == "preempted":
        assert engine.state()["preemptions"] > 0


def test_widths_may_differ_by_expert_and_layer() -> None:
    uneven = LayerChannels(tuple(range(5)), (tuple(range(5, 8)), tuple(range(5, 48)), tuple(range(8, 30))))
    model = carved(channels=[CHANNELS, uneven, CHANNELS])
    wanted = [expected(model, prompt) for prompt in prompts()]
    engine = Engine(model, **SMALL)
    assert engine.backend == "compiled-cpu" and answers(engine, prompts()) == wanted


def test_an_expert_without_channels_runs_eagerly() -> None:
    model = carved(channels=[CHANNELS, LayerChannels(tuple(range(5)), ((), (5, 6), (7, 8))), CHANNELS])
    wanted = [expected(model, prompt) for prompt in prompts()]
    engine = Engine(model, **SMALL)
    assert engine.backend == "eager" and answers(engine, prompts()) == wanted


@pytest.mark.parametrize("step", [{"bits": 4}, {"bits": 8, "input_activations": "int8"}], ids=["int4", "int8"])
def test_quantized_experts_run_compiled(step: dict[str, Any]) -> None:
    model = carved()
    METHODS.build({"method": "rtn", "group_size": 8 if step["bits"] == 4 else -1, **step}).apply(model, MethodContext())
    wanted = answers(Engine(copy.deepcopy(model), **SMALL, compiled=False), prompts())
    engine = Engine(model, **SMALL)
    assert engine.backend == "compiled-cpu" and answers(engine, prompts()) == wanted


@pytest.mark.parametrize("case", ["one slot", "two slots", "loaded when needed"])
@pytest.mark.parametrize("zero", [False, True])  # with a static zero point, the kernel prepares sums of the weights
@pytest.mark.parametrize("step", [{"bits": 4}, {"bits": 8, "input_activations": "int8"}], ids=["int4", "int8"])
def test_quantized_experts_are_loaded_into_slots(case: str, step: dict[str, Any], zero: bool) -> None:
    def quantized() -> Model:
        model = carved()
        METHODS.build({"method": "rtn", "group_size": -1, **step}).apply(model, MethodContext())
        layers = quantized_layers(model.network)
        assert "model.layers.0.mlp.experts.2.up_proj" in layers
        for layer in layers.values() if zero else ():
            layer.scheme = replace(layer.scheme, inputs=get_format("int8-asym"), static=True)
            layer.register_buffer(STATIC_SCALE, None)
            layer.register_buffer(STATIC_ZERO, None)
            layer.set_static_inputs(torch.tensor(0.05), torch.tensor(90))
        return model

    wanted = answers(Engine(quantized(), **SMALL), prompts())
    engine = Engine(quantized(), **{**SMALL, **CASES[case]})
    assert answers(engine, prompts()) == wanted
    assert engine.state()["expert_misses"] > 3
    floats = Engine(carved(), **{**SMALL, **CASES[case]})
    assert isinstance(engine.runner, RoutedRunner) and isinstance(floats.runner, RoutedRunner)
    slots, float_slots = engine.runner.slots, floats.runner.slots
    assert slots is not None and float_slots is not None and slots.expert_bytes < 0.5 * float_slots.expert_bytes


def test_experts_without_a_kernel_share_no_slots() -> None:
    model = carved()
    METHODS.build({"method": "rtn", "bits": 4, "group_size": -1}).apply(model, MethodContext())
    layer = quantized_layers(model.network)["model.layers.1.mlp.experts.2.up_proj"]
    layer.set_dequantized_weight(layer.weight)
    with pytest.raises(ModelError, match="have no kernel here"):
        Engine(model, **SMALL, expert_slots=1)


def test_experts_of_two_formats_share_no_slots() -> None:
    models = [carved(), carved()]
    for model, bits in zip(models, (4, 8), strict=True):
        METHODS.build({"method": "rtn", "bits": bits, "group_size": -1}).apply(model, MethodContext())
    experts = [carved_layers(model.network)[1].experts for model in models]
    experts[0][2] = experts[1][2]
    with pytest.raises(ModelError, match="layer 1 differ in size or format"):
        Engine(models[0], **SMALL, expert_slots=1)


def test_a_request_has_the_same_routes_alone_and_in_a_batch() -> None:
    routes = []
    for group in ([[prompt] for prompt in prompts()], [prompts()]):
        engine, seen = Engine(carved(), **SMALL), list[list[int]]()
        for texts in group:
            requests = [engine.submit(text, GREEDY)[0] for text in texts]
            while engine.busy:
                engine.step()
            seen += [request.expert_routes for request in requests]
        routes.append(seen)
    assert routes[0] == routes[1]
    model = carved()
    router = carved_routes_of(model.network).router
    for prompt, route in zip(prompts(), routes[0], strict=True):
        text = prompt + expected(model, prompt)
        assert route == router.route(torch.tensor([text]))[0, : len(route)].tolist()


def test_a_prompt_is_routed_when_it_is_queued() -> None:
    engine = Engine(carved(), **SMALL)
    request = engine.submit(prompts()[0], GREEDY)[0]
    assert len(request.expert_routes) == len(request.prompt)


def test_grouping_loads_fewer_experts_and_starves_nobody() -> None:
    """24 answers with two of three experts on the device; prompts of one token, so that most steps are grouped."""
    texts = [[token] for token in range(10, 34)]
    misses: dict[bool, int] = {}
    for grouped in (True, False):
        engine = Engine(carved(), **SMALL, expert_slots=2, expert_batching=grouped)
        sampling = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
        requests = [engine.submit(text, sampling)[0] for text in texts]
        longest = 0
        while engine.busy:
            engine.step()
            longest = max([longest, *(request.expert_wait for request in engine.scheduler.running)])
        assert all(len(request.output) == 30 for request in requests)
        misses[grouped] = engine.state()["expert_misses"]
        assert 0 < longest <= 8 + 3 if grouped else longest == 0
    assert misses[True] < 0.75 * misses[False]


def test_limited_slots_limit_the_experts_of_a_step() -> None:
    engine = Engine(carved(), **SMALL, expert_slots=1)
    requests = [engine.submit([token], GREEDY)[0] for token in range(10, 26)]
    engine.step()  # the prompts
    before = engine.state()["expert_uses"]
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    assert engine.state()["expert_uses"] - before <= steps
    assert all(len(request.output) == 12 for request in requests)


def test_counts_are_those_of_the_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(carved(), **SMALL, expert_slots=2, expert_batching=False)
    copies: list[tuple[int, int]] = []
    slots = engine.runner.slots  # type: ignore[attr-defined]
    plain = slots._copy
    monkeypatch.setattr(
        slots, "_copy", lambda index, access: (copies.append((index, access.expert)), plain(index, access))
    )
    answers(engine, prompts())
    state, layers = engine.state(), 3
    assert state["expert_hits"] + state["expert_misses"] == state["expert_uses"]
    assert len(copies) == layers * state["expert_misses"] > 0
    size = 3 * 32 * 8 * 4  # three matrices, hidden size, channels, bytes
    assert state["expert_bytes_loaded"] == len(copies) * size


def test_prefetching_copies_all_layers_before_the_first_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefetch in (True, False):
        model = carved()
        engine = Engine(model, **SMALL, expert_slots=3, expert_prefetch=prefetch)
        events: list[str] = []
        slots = engine.runner.slots  # type: ignore[attr-defined]
        plain = slots._copy
        monkeypatch.setattr(
            slots,
            "_copy",
            lambda index, access, plain=plain, events=events: (events.append("copy"), plain(index, access)),
        )
        carved_layers(model.network)[0].register_forward_pre_hook(lambda *_, events=events: events.append("layer"))
        answers(engine, prompts(1))
        assert (events.index("layer") >= 3) == prefetch and "copy" in events


def test_the_steps_after_a_queue_are_known() -> None:
    """Belady's policy learns from the waiting requests which expert is needed first."""
    engine = Engine(carved(), **SMALL, max_num_seqs=1)
    first, second = (engine.submit(prompt, GREEDY)[0] for prompt in prompts(2))
    batch = engine.scheduler.schedule()
    assert [chunk.request for chunk in batch.chunks] == [first]
    wanted: dict[int, int] = {}
    for position, expert in enumerate(second.expert_routes):
        wanted.setdefault(expert, position)
    assert batch.next_expert_use == wanted


def test_the_last_running_request_is_preempted_even_if_it_would_run_first() -> None:
    engine = Engine(carved(), **SMALL)
    requests = [engine.submit([token], GREEDY)[0] for token in (10, 11, 12)]
    engine.step()
    batch = type(engine.scheduler.schedule())()
    scheduler: Any = engine.scheduler
    assert scheduler._victim(batch) is requests[-1]
    scheduler._append(batch, requests[-1], 1)
    assert scheduler._victim(batch) is requests[1]


def test_what_cannot_be_served_is_refused() -> None:
    dense = Model(BUILDS["llama"]())
    with pytest.raises(ModelError, match="carve-experts"):
        Engine(dense, **SMALL, expert_slots=1)
    with pytest.raises(RequestError, match="more than the 3 experts"):
        Engine(carved(), **SMALL, expert_slots=4)
    with pytest.raises(ModelError, match="without adapters"):
        Engine(carved(), **SMALL, max_loras=1, max_lora_rank=4)
    with pytest.raises(ModelError, match="without adapters and without eviction"):
        Engine(carved(), **SMALL, kv_token_cap=64)
    with pytest.raises(ConfigError, match="belady, lru, random"):
        Engine(carved(), **SMALL, expert_policy="fifo")
    unequal = LayerChannels(CHANNELS.shared, (*CHANNELS.experts[:2], CHANNELS.experts[2][:-1]))
    with pytest.raises(ModelError, match="differ in size"):
        Engine(carved("llama", [unequal] * 3), **SMALL, expert_slots=1)
    assert isinstance(Engine(carved("llama", [unequal] * 3), **SMALL).runner, RoutedRunner)


def test_the_options_of_the_server_reach_the_engine() -> None:
    settings = ServeConfig(
        device="cpu", expert_slots=2, expert_policy="lru", expert_prefetch=False, expert_batching=False
    )
    fields = settings.resolve("some-model").engine
    assert (fields["expert_slots"], fields["expert_policy"]) == (2, "lru")
    assert (fields["expert_prefetch"], fields["expert_batching"]) == (False, False)


def test_the_counts_are_metrics() -> None:
    engine, metrics = Engine(carved(), **SMALL, expert_slots=2), ServerMetrics("m", 96)
    metrics.update_engine_state(engine.state())
    answers(engine, prompts())
    metrics.update_engine_state(engine.state())
    text, state = metrics.render(), engine.state()
    for name, key in (
        ("expert_cache_hits", "expert_hits"), ("expert_cache_misses", "expert_misses"), ("expert_uses", "expert_uses"),
        ("expert_bytes_loaded", "expert_bytes_loaded"),
    ):  # fmt: skip
        assert f'smelt:{name}_total{{model_name="m"}} {state[key]}' in text, text
        assert state[key] > 0


def test_siblings_and_abortion() -> None:
    engine = Engine(carved(), **SMALL, expert_slots=1)
    sampling = SamplingParams(max_tokens=6, temperature=1.0, seed=1, n=3, ignore_eos=True)
    requests: list[Request] = engine.submit(prompts()[0], sampling)
    engine.step()
    engine.abort(requests[1])
    while engine.busy:
        engine.step()
    assert [len(request.output) for request in (requests[0], requests[2])] == [6, 6]
