"""Settings that an engine with a KV profile refuses: one sentence, before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from smelt.errors import ConfigError, ModelError, RequestError
from smelt.kvcache.eviction.profile import EvictionProfile, KVShape
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from tests.serve.per_head.test_per_head_engine import SMALL, model_of
from tests.tiny import DECODER

SHAPE = KVShape("llama", 3, 2, 8)


def profile(shape: KVShape = SHAPE, scorer: str = "keydiff", **more: Any) -> EvictionProfile:
    def table(value: float) -> tuple[tuple[float, ...], ...]:
        return ((value,) * shape.num_kv_heads,) * shape.num_layers

    return EvictionProfile(shape, scorer, 0.3, 1, table(0.3), table(0.0), **more)


def test_a_profile_and_its_file_are_served(tmp_path: Path) -> None:
    file = tmp_path / "llama.kv.json"
    profile(scorer_params={"sink": 2, "window": 4}).with_clusters(2).save(file)
    for kv in (file, str(file), profile()):
        engine = Engine(model_of("llama"), kv_profile=kv, **SMALL)
        assert engine.runner.backend.endswith("per-head cache")


@pytest.mark.parametrize("other", [KVShape("llama", 4, 2, 8), KVShape("qwen3", 3, 2, 8), KVShape("llama", 3, 2, 16)])
def test_a_profile_of_another_model(other: KVShape) -> None:
    with pytest.raises(ModelError, match=r"the profile is of a .*; the model is .*: profile this model"):
        Engine(model_of("llama"), kv_profile=profile(other), **SMALL)


def test_a_scorer_that_needs_a_second_pass() -> None:
    with pytest.raises(ConfigError, match="kvzip reads a prompt twice, which a server does not"):
        Engine(model_of("llama"), kv_profile=profile(scorer="kvzip"), **SMALL)


def test_a_model_with_sliding_layers() -> None:
    network = hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=16)).eval()
    with pytest.raises(ModelError, match="sliding-window layers"):
        Engine(Model(network), kv_profile=profile(KVShape("mistral", 3, 2, 8)), **SMALL)


def test_several_devices() -> None:
    with pytest.raises(ModelError, match="not split over several devices yet"):
        Engine(model_of("llama"), kv_profile=profile(), tensor_parallel_size=2, **SMALL)


def test_a_cache_smaller_than_a_chunk() -> None:
    with pytest.raises(RequestError, match=r"hold no block of 4 tokens.*beside the .* of a step's chunks"):
        Engine(model_of("llama"), kv_profile=profile(), block_size=4, max_model_len=96, kv_cache_bytes=20_000)


def test_other_files(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    with pytest.raises(ModelError, match="not a KV cache profile"):
        Engine(model_of("llama"), kv_profile=file, **SMALL)
    with pytest.raises(ModelError, match="is missing or not a regular file"):
        Engine(model_of("llama"), kv_profile=tmp_path / "none.json", **SMALL)
