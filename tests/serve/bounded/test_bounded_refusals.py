"""Settings that cannot be served with a bounded KV cache: one sentence with a way out, from the engine and the CLI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from smelt.cli.app import call, program
from smelt.errors import ConfigError, ModelError, RequestError, ResourceError, SmeltError
from smelt.kvcache.streaming import InfiniPot
from smelt.kvcache.streaming.config import BoundedCacheConfig
from smelt.models.model import Model
from smelt.serve.engine.engine import Engine
from tests.serve.bounded.test_bounded_engine import BLOCK, BLOCK_BYTES, RULE, answers, words
from tests.tiny import BUILDS


@pytest.mark.parametrize(
    ("options", "error_type", "sentence"),
    [
        ({"kv_token_cap": 0}, ConfigError, "a cap of 0 tokens holds nothing"),
        ({"kv_token_cap": -5}, ConfigError, "a cap of -5 tokens holds nothing"),
        (
            {"kv_token_cap": BoundedCacheConfig(12, method=RULE)},
            ConfigError,
            r"12 tokens is too small.*takes 3, and a block of 4.*at least 13",
        ),
        ({"kv_token_cap": BoundedCacheConfig(40, 35, RULE)}, ConfigError, r"keeps 35 leaves 2 .* keep at most 33"),
        ({"kv_token_cap": BoundedCacheConfig(40, 40, RULE)}, ConfigError, "cannot keep 40 and read more"),
        (
            {"kv_token_cap": BoundedCacheConfig(129, method=RULE)},
            ConfigError,
            "the cap is 129 tokens, and this model was trained for 128",
        ),
        (
            {"kv_token_cap": BoundedCacheConfig(40, method=RULE), "page_selection": {"token_budget": 512}},
            ConfigError,
            "exclude each other",
        ),
        (
            {"kv_token_cap": BoundedCacheConfig(40, method=RULE), "kv_profile": "none.json"},
            ConfigError,
            "exclude each other",
        ),
        (
            {"kv_token_cap": BoundedCacheConfig(40, method=RULE), "tensor_parallel_size": 2},
            ModelError,
            "not kept on several devices yet: use one",
        ),
        ({"kv_token_cap": BoundedCacheConfig(40, method=RULE), "max_model_len": 1}, RequestError, "give at least 2"),
        (
            {"kv_token_cap": BoundedCacheConfig(40, method=RULE), "kv_cache_bytes": 9 * BLOCK_BYTES},
            ResourceError,
            r"holds 36 tokens, and the cap is 40, which takes .* bytes; give more memory, or a smaller cap",
        ),
    ],
    ids=str,
)
def test_impossible_caps(options: dict[str, Any], error_type: type[SmeltError], sentence: str) -> None:
    with pytest.raises(error_type, match=sentence):
        Engine(Model(BUILDS["llama"]()), block_size=BLOCK, **options)


def test_the_smallest_cap_works() -> None:
    engine = Engine(Model(BUILDS["llama"]()), block_size=BLOCK, kv_token_cap=BoundedCacheConfig(13, method=RULE))
    assert len(answers(engine, [words(60)])[0]) == 16


@pytest.mark.parametrize(("name", "sentence"), [("mistral", "sliding-window layers"), ("gpt2", "no rotary positions")])
def test_models_whose_cache_cannot_be_compressed(name: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        Engine(Model(BUILDS[name]()), block_size=BLOCK, kv_token_cap=BoundedCacheConfig(40, method=RULE))


def test_positions_must_be_renumbered() -> None:
    with pytest.raises(ConfigError, match="leave `renumber` on"):
        BoundedCacheConfig(40, method=InfiniPot(renumber=False))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--kv-token-cap", "0"], "--kv-token-cap must be a positive number of tokens, not 0"),
        (["--kv-token-cap", "-7"], "--kv-token-cap must be a positive number of tokens, not -7"),
        (["--kv-token-cap", "512", "--kv-profile", "some.json"], "--kv-token-cap and --kv-profile cannot be combined"),
        (["--kv-token-cap", "512", "--kv-select", "pages"], "--kv-token-cap and --kv-select cannot be combined"),
    ],
    ids=str,
)
def test_the_command_line_refuses_at_once(options: list[str], sentence: str) -> None:
    arguments = ["serve", "smollm2-135m", *options]
    with pytest.raises(SmeltError, match=sentence):
        call(program(arguments), arguments)


def test_a_cap_that_is_too_small_for_the_model_is_one_sentence(model_folder: Path) -> None:
    command = [sys.executable, "-m", "smelt.cli.main", "serve", str(model_folder), "--kv-token-cap", "100"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    message = " ".join(ended.stderr.split())
    assert ended.returncode == 2 and "Traceback" not in message
    assert "a cap of 100 tokens is too small" in message and "give at least" in message
