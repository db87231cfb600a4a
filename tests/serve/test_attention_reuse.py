"""Networks that share attention maps in the engine: transformers' tokens, and no keys of layers without a map."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from smelt.compression.base import MethodContext
from smelt.compression.methods import METHODS
from smelt.errors import ModelError
from smelt.kvcache.streaming.config import BoundedCacheConfig
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.attention_reuse import kv_cache_share, reuse_attention
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.serve.test_engine import SMALL, answers, expected, prompts
from tests.tiny import BUILDS, DECODER, build_network
from tests.trained import sentences, trained_llama

GROUPS = {1: 0, 2: 0}


def deep_llama(**changes: Any) -> PreTrainedModel:
    settings = {**DECODER, "num_hidden_layers": 6, **changes}
    return build_network(transformers.LlamaForCausalLM, transformers.LlamaConfig(**settings))


def shared(network: PreTrainedModel, leaders: dict[int, int] = GROUPS) -> Model:
    model = Model(copy.deepcopy(network))
    reuse_attention(model.anatomy, leaders)
    return model


@pytest.fixture(scope="module")
def trained() -> tuple[Model, list[list[int]]]:
    """Return a trained network that shares a map, whose answers differ, and transformers' answers."""
    model = shared(trained_llama(sentences(400)))
    reference = [expected(model.network, prompt) for prompt in prompts()]
    assert len({tuple(answer) for answer in reference}) > 1
    return model, reference


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "opt"])
def test_the_tokens_of_eager_attention(name: str, compiled: bool) -> None:
    model = shared(BUILDS[name]())
    reference = [expected(model.network, prompt) for prompt in prompts()]
    engine = Engine(model, **SMALL, compiled=compiled)
    assert engine.backend == ("compiled-cpu" if compiled and name != "opt" else "eager")
    assert answers(engine, prompts()) == reference


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("chunk", "batch_tokens", "requests"), [(None, 2048, 1), (3, 2048, 6), (5, 8, 2)])
def test_any_chunks_and_batches(
    trained: tuple[Model, list[list[int]]], compiled: bool, chunk: int | None, batch_tokens: int, requests: int
) -> None:
    model, reference = trained
    engine = Engine(
        copy.deepcopy(model), prefill_chunk_size=chunk, max_num_batched_tokens=batch_tokens, max_num_seqs=requests,
        compiled=compiled, **SMALL,
    )  # fmt: skip
    assert answers(engine, prompts()) == reference
    assert answers(engine, prompts()) == reference  # now from the prefix cache


@pytest.mark.parametrize("leaders", [{1: 0, 2: 0, 4: 3, 5: 3}, {2: 0, 3: 1}, {1: 0, 5: 4}])
def test_several_groups_also_interleaved_ones(leaders: dict[int, int]) -> None:
    """Each layer reads the queries of its own leader, also if another leader has run in between."""
    model = shared(deep_llama(), leaders)
    reference = [expected(model.network, prompt) for prompt in prompts()]
    for compiled in (True, False):
        assert answers(Engine(copy.deepcopy(model), **SMALL, compiled=compiled), prompts()) == reference


@pytest.mark.parametrize("group", [2, 3, 6])
@pytest.mark.parametrize("kv_cache_dtype", [None, "int4"])
def test_the_cache_of_a_group_has_one_tensor_of_keys(group: int, kv_cache_dtype: str | None) -> None:
    """G values and one tensor of keys of 2 G, in the pool's bytes and in the pages that exist."""
    network = deep_llama(hidden_size=64, head_dim=16)
    leaders = {layer: layer - layer % group for layer in range(6) if layer % group}
    engines = [
        Engine(model, **SMALL, kv_cache_dtype=kv_cache_dtype) for model in (Model(network), shared(network, leaders))
    ]
    dense, ours = (engine.pool.block_bytes for engine in engines)
    assert ours * 2 * group == dense * (group + 1)
    for engine in engines:
        runner: Any = engine.runner
        tensors = {
            tensor.data_ptr(): tensor for pages in (runner.cache.keys, runner.cache.values) for tensor in pages.values()
        }
        assert sum(tensor.nbytes for tensor in tensors.values()) == engine.pool.block_bytes * engine.pool.num_blocks
    assert kv_cache_share(engines[1].model.anatomy) == (group + 1) / (2 * group)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int4", "fp8"])
def test_a_quantized_cache_gives_the_same_compiled_and_eager(
    trained: tuple[Model, list[list[int]]], kv_cache_dtype: str
) -> None:
    """The compiled program rotates queries once, for all layers of a group."""
    model, reference = trained
    compiled, eager = (
        answers(Engine(copy.deepcopy(model), **SMALL, kv_cache_dtype=kv_cache_dtype, compiled=on), prompts())
        for on in (True, False)
    )
    assert compiled == eager
    if kv_cache_dtype != "int4":
        assert compiled == reference


def test_an_artifact_with_packed_weights_is_served_compiled(tmp_path: Path) -> None:
    model = shared(trained_llama(sentences(400)))
    METHODS.build({"method": "rtn", "bits": 8, "group_size": 8}).apply(model, MethodContext())
    save_artifact(model, tmp_path)
    again = load_artifact(tmp_path)
    reference = [expected(again.network, prompt) for prompt in prompts()]
    engine = Engine(again, **SMALL)
    assert engine.backend == "compiled-cpu" and answers(engine, prompts()) == reference


def test_settings_that_need_keys_of_every_layer_are_refused() -> None:
    for options in ({"kv_token_cap": BoundedCacheConfig(64)}, {"tensor_parallel_size": 2}):
        with pytest.raises(ModelError, match="have no keys of their own"):
            Engine(shared(BUILDS["llama"]()), **SMALL, **options)


def test_attention_that_returns_no_map_is_still_refused_after_serving() -> None:
    """What paged attention leaves behind must not be taken for the map of a later forward pass."""
    model = shared(BUILDS["llama"]())
    answers(Engine(model, **SMALL, compiled=False), prompts(2), SamplingParams(max_tokens=2, temperature=0))
    model.network.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="only eager attention computes"), torch.no_grad():
        model.network(torch.tensor([prompts(1)[0]]))
