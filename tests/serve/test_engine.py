"""The engine's tokens match transformers: alone, in any batch, in chunks, with and without the prefix cache, after
preemption; for every family, pruned and quantized.
"""

from __future__ import annotations

import copy
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

import smelt
from smelt.compression.base import MethodContext
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.errors import ConfigError, ModelError, RequestError, SmeltError
from smelt.kernels import linear
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.numerics import get_format
from smelt.serve.engine import engine as engine_module
from smelt.serve.engine.config import EngineConfig, KVCacheConfig
from smelt.serve.engine.engine import Engine, RequestOutput
from smelt.serve.engine.request import Request, RequestStatus
from smelt.serve.engine.sampling_params import SamplingParams
from tests.character_tokenizer import character_tokenizer
from tests.models.test_surgery import cut, random_masks
from tests.tiny import BUILDS, DECODERS
from tests.trained import sentences, trained_llama

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
SMALL: dict[str, Any] = {"block_size": 4, "max_model_len": 96, "kv_cache_bytes": 10**7}


def prompts(count: int = 6, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    beginning = [rng.randrange(3, 99) for _ in range(30)]
    return [
        beginning[: rng.randrange(30)] + [rng.randrange(3, 99) for _ in range(rng.randrange(1, 20))]
        for _ in range(count)
    ]


def expected(network: PreTrainedModel, prompt: list[int], count: int = 16) -> list[int]:
    """Generate with transformers, ignoring end-of-sequence tokens."""
    network = copy.deepcopy(network)
    network.generation_config.eos_token_id = None
    with torch.no_grad():
        output = network.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return list(output[0, len(prompt) :].tolist())


def answers(engine: Engine, texts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    requests = [engine.submit(text, sampling)[0] for text in texts]
    run(engine)
    return [request.output for request in requests]


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()
        pool = engine.pool
        assert pool.num_free_blocks + sum(count > 0 for count in pool.references) == pool.num_blocks
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_match_transformers(name: str) -> None:
    network = BUILDS[name]()
    reference = [expected(network, prompt) for prompt in prompts()]
    assert answers(Engine(Model(network), **SMALL), prompts()) == reference


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_quantized_lm_head_gives_the_tokens_of_its_rounded_weights(name: str) -> None:
    """The head alone is rounded: not the table of embeddings, which GPT-2 shares with it."""
    network = BUILDS[name]()
    engine = Engine(Model(copy.deepcopy(network)), **SMALL, lm_head_dtype="int8")
    assert engine.backend.endswith(", int8 LM head") and "lm_head" in quantized_layers(engine.model.network)
    table = network.get_input_embeddings().weight
    assert torch.equal(engine.model.network.get_input_embeddings().weight, table)
    head = network.get_output_embeddings()
    rounded = get_format("int8/row").quantize(head.weight.detach()).dequantize()
    head.weight = torch.nn.Parameter(rounded)
    network.config.tie_word_embeddings = False
    assert answers(engine, prompts()) == [expected(network, prompt) for prompt in prompts()]
    with pytest.raises(ConfigError, match="there is no LM head dtype 'int2'; there is int8"):
        Engine(Model(network), **SMALL, lm_head_dtype="int2")
    with pytest.raises(ModelError, match="a quantized LM head is not split over several devices yet"):
        Engine(Model(network), **SMALL, lm_head_dtype="int8", tensor_parallel_size=2)


@pytest.fixture(scope="module")
def llama() -> tuple[PreTrainedModel, list[list[int]]]:
    """Return a trained network, whose answers differ, and transformers' answers."""
    network = copy.deepcopy(trained_llama(sentences(400)))
    return network, [expected(network, prompt) for prompt in prompts()]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 16, None])
@pytest.mark.parametrize("batch_tokens", [7, 512])
def test_no_setting_changes_a_token(
    llama: tuple[PreTrainedModel, list[list[int]]], enable_prefix_caching: bool, chunk: int | None, batch_tokens: int
) -> None:
    network, reference = llama
    engine = Engine(
        Model(copy.deepcopy(network)),
        enable_prefix_caching=enable_prefix_caching,
        prefill_chunk_size=chunk,
        max_num_batched_tokens=batch_tokens,
        **SMALL,
    )
    assert answers(engine, prompts()) == reference
    assert answers(engine, prompts()) == reference  # now from the prefix cache, if enabled


@pytest.mark.parametrize("requests", [1, 2, 6])
def test_any_batch(llama: tuple[PreTrainedModel, list[list[int]]], requests: int) -> None:
    network, reference = llama
    assert answers(Engine(Model(copy.deepcopy(network)), max_num_seqs=requests, **SMALL), prompts()) == reference


@pytest.mark.parametrize("compiled", [True, False])
def test_a_seeded_request_is_reproducible_in_any_batch(llama: tuple[PreTrainedModel, Any], compiled: bool) -> None:
    """The tokens are equal; the log-probabilities agree up to rounding, which depends on the shapes of the products."""
    sampling = SamplingParams(max_tokens=16, temperature=0.8, seed=11, logprobs=2, ignore_eos=True)
    prompt, *others = prompts()

    def answer(before: int = 0, after: int = 0, repeats: int = 1, **options: Any) -> RequestOutput:
        model = Model(copy.deepcopy(llama[0]), tokenizer=character_tokenizer())
        engine = Engine(model, compiled=compiled, **SMALL, **options)
        for _ in range(repeats):
            result = engine.generate([*others[:before], prompt, *others[:after]], sampling)[before]
        return result

    alone = answer()
    for result in (
        answer(), answer(after=1), answer(after=5), answer(before=3), answer(before=1, after=3), answer(repeats=2),
        answer(prefill_chunk_size=1), answer(prefill_chunk_size=7, after=2),
    ):  # fmt: skip
        assert result.tokens == alone.tokens
        for actual, expected_ in zip(result.logprobs, alone.logprobs, strict=True):
            assert actual.own == pytest.approx(expected_.own, abs=1e-5)
            assert [value for _, value in actual.top] == pytest.approx([value for _, value in expected_.top], abs=1e-5)


def test_warmup_leaves_no_trace(llama: tuple[PreTrainedModel, Any]) -> None:
    engine = Engine(Model(copy.deepcopy(llama[0])), **SMALL)
    steps, before = [], engine.state()
    launch = engine.runner.launch
    engine.runner.launch = lambda step: (steps.append(step.tokens), launch(step))[1]  # type: ignore[method-assign]
    engine.warmup()
    assert steps == [1] * 4  # nothing to compile on CPU: only the time of a step is measured
    steps.clear()
    engine.warmup([50, 7, 1000])
    assert sum(steps) >= 50 + 7 + 3 * 3 and engine.state() == before and not engine.busy
    request = engine.submit([0] * 40, GREEDY)[0]
    run(engine)
    assert request.num_cached_tokens == 0  # the same tokens, but no cached prefix


def test_warmup_submits_at_most_max_queued(llama: tuple[PreTrainedModel, Any]) -> None:
    engine = Engine(Model(copy.deepcopy(llama[0])), max_queued=2, **SMALL)
    engine.warmup([20] * 5)
    assert not engine.busy


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preemption_loses_nothing(llama: tuple[PreTrainedModel, list[list[int]]], enable_prefix_caching: bool) -> None:
    network, reference = llama
    bytes_of_block = 3 * 2 * 4 * 2 * 8 * 4
    engine = Engine(
        Model(copy.deepcopy(network)),
        block_size=4,
        max_model_len=96,
        kv_cache_bytes=22 * bytes_of_block,
        enable_prefix_caching=enable_prefix_caching,
    )
    requests = [engine.submit(prompt, GREEDY)[0] for prompt in prompts()]
    run(engine)
    assert sum(request.preemptions for request in requests) > 0
    assert [request.output for request in requests] == reference


@pytest.mark.parametrize("seed", [3, 5])
def test_a_request_that_returns_to_its_row_uses_its_new_blocks(
    seed: int, llama: tuple[PreTrainedModel, list[list[int]]]
) -> None:
    """With three rows a preempted request gets the same row again, which still lists its previous blocks."""
    network, texts = llama[0], prompts(6, seed)
    engine = Engine(
        Model(copy.deepcopy(network)),
        block_size=4,
        max_model_len=96,
        kv_cache_bytes=22 * 3 * 2 * 4 * 2 * 8 * 4,
        enable_prefix_caching=False,
        max_num_seqs=3,
    )
    long = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    requests = [engine.submit(text, long)[0] for text in texts]
    run(engine)
    assert sum(request.preemptions for request in requests) > 0
    assert [request.output for request in requests] == [expected(network, text, 30) for text in texts]


@pytest.mark.parametrize(
    "empty", [(), ("heads0",), ("ffn_channels1",), ("heads0", "heads1", "heads2", "ffn_channels0")]
)
def test_a_pruned_network_with_per_layer_widths(empty: tuple[str, ...]) -> None:
    network = BUILDS["llama"]()
    cut(network, random_masks(network, empty=empty))
    reference = [expected(network, prompt) for prompt in prompts()]
    assert answers(Engine(Model(network), **SMALL), prompts()) == reference


def test_layers_without_a_kernel_are_dequantized_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine without a compiler: one warning, the same tokens, and nothing is unpacked at a step."""
    monkeypatch.setattr(linear, "_kernels", {})
    monkeypatch.setattr(linear, "_unloaded", [])
    network = BUILDS["llama"]()
    RoundToNearest(bits=8, group_size=16, input_activations="int8").apply(Model(network), MethodContext())
    reference = [expected(network, text) for text in prompts()]
    engine = Engine(Model(network), compiled=False, **SMALL)
    layers = list(quantized_layers(network).values())
    assert {layer.backend for layer in layers} == {"dequantized at load"}
    unpacked = []
    monkeypatch.setattr(linear.ReferenceLinear, "run", lambda *args: unpacked.append(args))
    assert answers(engine, prompts()) == reference and not unpacked
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"{len(layers)} of {len(layers)} quantized layers (int8-asym/16@float16)"), warning


def test_a_quantized_network() -> None:
    model = Model(BUILDS["llama"]())
    RoundToNearest(bits=4, group_size=16).apply(model, MethodContext())
    reference = [expected(model.network, prompt) for prompt in prompts()]
    assert answers(Engine(model, **SMALL), prompts()) == reference


@pytest.mark.parametrize("compiled", [True, False])
def test_activations_quantized_at_load_are_rounded_per_token(compiled: bool) -> None:
    model = Model(BUILDS["llama"]())
    RoundToNearest(bits=4, group_size=32, allow_partial_group=True).apply(model, MethodContext())
    network = copy.deepcopy(model.network)
    engine = Engine(model, compiled=compiled, activation_dtype="int8", **SMALL)
    assert engine.backend.endswith(", int8 activations")
    rounded = [path for path, layer in quantized_layers(model.network).items() if layer.scheme.inputs is not None]
    assert len(rounded) > 3
    for path in rounded:
        network.get_submodule(path).round_inputs = get_format("int8").fake_quantize
    assert answers(engine, prompts()) == [expected(network, prompt) for prompt in prompts()]


def test_activations_that_no_layer_can_quantize_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no activation dtype 'int2'; there is int8"):
        Engine(Model(BUILDS["llama"]()), **SMALL, activation_dtype="int2")
    with pytest.raises(ModelError, match="no layer of this model can take int8 activations on cpu"):
        Engine(Model(BUILDS["llama"]()), **SMALL, activation_dtype="int8")
    with pytest.raises(ModelError, match="activations are not quantized at load on several devices yet"):
        Engine(Model(BUILDS["llama"]()), **SMALL, activation_dtype="int8", tensor_parallel_size=2)


def test_a_sliding_window_is_respected() -> None:
    network = BUILDS["mistral"]()
    network.config.sliding_window = 6
    network = type(network)(network.config).eval()
    reference = [expected(network, prompt) for prompt in prompts()]
    assert answers(Engine(Model(network), **SMALL), prompts()) == reference


def engine_of(network: PreTrainedModel, **more: Any) -> Engine:
    return Engine(Model(copy.deepcopy(network), character_tokenizer()), **{**SMALL, **more})


def test_a_seed_gives_the_same_tokens_at_any_batch_position(llama: tuple[PreTrainedModel, Any]) -> None:
    network, _ = llama
    text, params = prompts()[0], SamplingParams(max_tokens=16, seed=7, temperature=1.3, top_p=0.95, ignore_eos=True)
    alone = answers(engine_of(network), [text], params)[0]
    engine = engine_of(network, prefill_chunk_size=3)
    others = [engine.submit(prompt, SamplingParams(max_tokens=9, temperature=0.9))[0] for prompt in prompts()]
    seeded = engine.submit(text, params)[0]
    run(engine)
    assert seeded.output == alone and all(len(request.output) for request in others)
    assert answers(
        engine_of(network), [text], SamplingParams(max_tokens=16, seed=8, temperature=1.3, ignore_eos=True)
    ) != [alone]


def test_samples_of_one_prompt_differ_and_share_its_blocks(llama: tuple[PreTrainedModel, Any]) -> None:
    network, _ = llama
    engine = engine_of(network, enable_prefix_caching=False)
    text = prompts()[0]
    requests = engine.submit(text, SamplingParams(max_tokens=12, temperature=2.0, n=4, seed=3, ignore_eos=True))
    computed = 0
    while engine.busy:
        step = engine.scheduler.schedule()
        computed += step.tokens
        engine._read(engine.runner.launch(step))
    assert len({tuple(request.output) for request in requests}) == 4
    assert computed < 2 * len(text) + 4 * 12
    assert engine.pool.num_free_blocks == engine.pool.num_blocks


def test_generate_with_texts_and_a_stop_string(llama: tuple[PreTrainedModel, Any]) -> None:
    network, _ = llama
    plain, stopped = (
        engine_of(network).generate(["the cat "], SamplingParams(max_tokens=40, temperature=0, stop=stop))[0]
        for stop in ((), ("t h e",))
    )
    assert plain.reason == "length" and len(plain.tokens) == 40 and "t h e" in plain.text
    assert stopped.reason == "stop" and stopped.text == plain.text.split("t h e")[0]


def test_an_aborted_request_frees_its_blocks(llama: tuple[PreTrainedModel, Any]) -> None:
    engine = engine_of(llama[0])
    (aborted,), (kept,) = engine.submit(prompts()[0], GREEDY), engine.submit(prompts()[1], GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort(aborted)
    run(engine)
    assert aborted.state is RequestStatus.FINISHED and aborted.reason == "abort" and len(aborted.output) < 16
    assert kept.output == llama[1][1]


def test_logprobs_match_the_network(llama: tuple[PreTrainedModel, Any]) -> None:
    network, _ = llama
    text = prompts()[0]
    answer = engine_of(network).generate([text], SamplingParams(max_tokens=5, temperature=0, logprobs=3))[0]
    with torch.no_grad():
        logits = network(torch.tensor([[*text, *answer.tokens]])).logits[0, len(text) - 1 : -1]
    reference = logits.log_softmax(-1)
    for position, (token, actual) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        assert actual.own == pytest.approx(float(reference[position, token]), abs=1e-4)
        values, tokens = reference[position].topk(3)
        assert [pair[0] for pair in actual.top] == tokens.tolist()
        assert [pair[1] for pair in actual.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_eos_stop_tokens_and_min_tokens(llama: tuple[PreTrainedModel, Any]) -> None:
    network, reference = llama
    text, answer = prompts()[0], reference[0]
    stop = answer[4]
    first = answer.index(stop)
    engine = engine_of(network)

    def only(**more: Any) -> Request:
        request = engine.submit(text, SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, **more))[0]
        run(engine)
        return request

    actual = only(stop_token_ids=(stop,))
    assert actual.output == answer[: first + 1] and actual.reason == "stop"
    later = only(stop_token_ids=(stop,), min_tokens=first + 2)
    assert stop not in later.output[: first + 1]
    engine.runner.eos_token_ids = (stop,)
    ended = engine.submit(text, SamplingParams(max_tokens=16, temperature=0))[0]
    run(engine)
    assert ended.output == answer[: first + 1] and ended.reason == "stop"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([5] * 96, "must fit into 96"), ([5, 99], "no token 99"), ([-1], "no token -1")],
)
def test_bad_prompts(llama: tuple[PreTrainedModel, Any], prompt: list[int], message: str) -> None:
    engine = engine_of(llama[0])
    with pytest.raises(RequestError, match=message):
        engine.submit(prompt, GREEDY)
    assert not engine.busy


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"n": 0}, {"n": 10**6},
        {"max_tokens": -1}, {"logprobs": 1025}, {"stop": ("",)}, {"stop": ("a",) * 17}, {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: float("inf")}}, {"seed": 2**64}, {"top_k": -1}, {"presence_penalty": 3.0}, {"n": True},
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**wrong)


def test_unsupported_models() -> None:
    with pytest.raises(ModelError, match="no language model"):
        Engine(Model(BUILDS["bert"]()))
    with pytest.raises(RequestError, match="hold no block"):
        Engine(Model(BUILDS["llama"]()), kv_cache_bytes=10)
    with pytest.raises(RequestError, match="positions"):
        Engine(Model(BUILDS["llama"]()), max_model_len=1000)


@pytest.mark.parametrize(("old", "new"), [("LiveEngine", "AsyncEngine"), ("Sampling", "SamplingParams")])
def test_old_public_names_work_for_one_version(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"smelt.{old} is now smelt.{new}"):
        assert getattr(smelt, old) is getattr(smelt, new)


def test_settings_are_a_config_or_its_fields() -> None:
    config = EngineConfig(max_model_len=96, kv_cache=KVCacheConfig(block_size=4, kv_cache_bytes=10**7))
    assert EngineConfig.from_fields(**SMALL) == config
    engine = Engine(Model(BUILDS["llama"]()), config)
    assert engine.pool.block_size == 4 and engine.max_model_len == 96
    with pytest.raises(TypeError, match="not both"):
        Engine(Model(BUILDS["llama"]()), config, block_size=4)
    with pytest.raises(TypeError, match="did you mean 'max_num_seqs'"):
        Engine(Model(BUILDS["llama"]()), max_num_seq=4)
    with pytest.warns(FutureWarning, match=r"Engine\(context=...\) is now Engine\(max_model_len=...\)"):
        assert EngineConfig.from_fields(context=96).max_model_len == 96
    with pytest.warns(FutureWarning, match=r"Engine\(enable_prefix_caching=...\)"):
        assert not EngineConfig.from_fields(prefix_cache=False).kv_cache.enable_prefix_caching


def test_settings_are_checked_before_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BUILDS["llama"]().save_pretrained(tmp_path)
    monkeypatch.setattr("smelt.serve.engine.engine.load", lambda *_, **__: pytest.fail("weights were loaded"))
    for settings, error in (
        ({"max_model_len": 1000}, RequestError),
        ({"kv_cache_dtype": "int2"}, ConfigError),
        ({"kv_profile": str(tmp_path / "none.json")}, SmeltError),
        ({"kv_token_cap": 512, "page_selection": {}}, ConfigError),
        ({"kv_offload": {}}, ConfigError),
        *(({name: 0}, ConfigError) for name in ("block_size", "kv_cache_bytes", "max_num_seqs", "max_queued")),
        *(({name: -1}, ConfigError) for name in ("max_num_batched_tokens", "prefill_chunk_size")),
        ({"tensor_parallel_size": 0}, ConfigError),
    ):
        with pytest.raises(error):
            Engine(str(tmp_path), **settings)


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8"}, {"kv_token_cap": 4096}, {"tensor_parallel_size": 2}])
def test_a_cache_that_a_model_cannot_have_is_refused_before_it_is_loaded(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = hf.BloomForCausalLM(hf.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4))
    network.save_pretrained(tmp_path)
    monkeypatch.setattr(engine_module, "load", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(ModelError, match="its KV cache is not paged"):
        Engine(str(tmp_path), **settings)
