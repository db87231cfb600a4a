"""`smelt serve` before a model is loaded: flags, their old names, the configuration file, and impossible options."""

from __future__ import annotations

import asyncio
import json
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import jsonschema_rs
import pytest
import transformers as hf

from smelt.cli.app import RENAMED_FLAGS, with_new_flags
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.serve.engine.config import EngineConfig
from smelt.serve.engine.kv_dtype import KV_CACHE_DTYPES
from smelt.serve.server.service import Service
from smelt.serve.server.settings import ServeConfig, ServerLimits, ServerSettings
from smelt.serve.worker.client import EngineClient
from smelt.strict_yaml import load_yaml
from tests.cli.conftest import Smelt, smelt_here  # noqa: F401
from tests.serve.server_process import PATIENCE


@pytest.mark.parametrize("command", RENAMED_FLAGS)
def test_old_flags_are_rewritten_with_a_warning(command: str) -> None:
    for old, new in RENAMED_FLAGS[command].items():
        with pytest.warns(FutureWarning, match=f"`{old}` in smelt {command} is now called `{new}`;"):
            assert with_new_flags([command, "x", old, "7"]) == [command, "x", new, "7"]
        with pytest.warns(FutureWarning, match=f"`{old}` in smelt {command} is now called `{new}`;"):
            assert with_new_flags(["--debug", command, f"{old}=7"]) == ["--debug", command, f"{new}=7"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert with_new_flags(["inspect", old, new]) == ["inspect", old, new]
            assert with_new_flags([command, new, "7"]) == [command, new, "7"]


@pytest.mark.parametrize("command", ["serve", "chat", "load-test"])
def test_help_lists_the_new_flags_only(command: str, smelt_here: Smelt) -> None:  # noqa: F811
    text = smelt_here(command, "--help").out
    words = set(text.replace("/", " ").split())
    assert set(RENAMED_FLAGS[command].values()) <= words and not set(RENAMED_FLAGS[command]) & words
    assert command != "serve" or "extra cluster" in text


def test_options_are_refused_before_the_model_is_loaded(
    smelt_here: Smelt,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def start(self: Service) -> None:
        raise AssertionError("the model is being loaded")

    monkeypatch.setattr(Service, "start", start)
    smelt_here("serve", "x", "--kv-profile", str(tmp_path / "none.json")).refused("is not a file")
    smelt_here("serve", "x", "--kv-select", "rows").refused("the only choice is pages")
    smelt_here("serve", "x", "--kv-offload").refused("requires --kv-select pages")
    smelt_here("serve", "x", "--lora-modules", "poet").refused("is not NAME=FOLDER")
    smelt_here("serve", "x", "--lora-modules", "a=x", "--lora-modules", "a=y").refused("names 'a' twice")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        smelt_here("serve", "x", "--port", str(taken.getsockname()[1])).refused("cannot listen")


CONFIG = """
host: 127.0.0.1
port: 9000
served_model_name: my-model
kv_cache_gib: 0.5
enable_prefix_caching: false
kv_select: pages
kv_budget: 512
step_timeout: 60
lora_modules: [poet=adapters/poet]
"""


@pytest.fixture
def serve_settings(monkeypatch: pytest.MonkeyPatch, smelt_here: Smelt) -> Callable[..., ServerSettings]:  # noqa: F811
    """Return the settings that a `smelt serve` command would start a server with."""
    started: list[ServerSettings] = []
    monkeypatch.setattr("smelt.serve.server.server.serve", lambda settings: started.append(settings) or 0)

    def settings_for(*arguments: str) -> ServerSettings:
        assert smelt_here("serve", "x", *arguments).code == 0
        return started.pop()

    return settings_for


def test_a_config_file_and_flags(serve_settings: Callable[..., ServerSettings], tmp_path: Path) -> None:
    """Keys of the file set options; flags on the command line win, also with their default; others have defaults."""
    path = tmp_path / "serve.yaml"
    path.write_text(CONFIG)
    settings = serve_settings("--config", str(path))
    assert (settings.port, settings.name, settings.adapters) == (9000, "my-model", {"poet": "adapters/poet"})
    assert settings.limits == ServerLimits(step_timeout=60)
    config = EngineConfig.from_fields(**settings.engine)
    assert config.max_num_seqs == EngineConfig.max_num_seqs and config.kv_cache.kv_cache_bytes == 2**29
    assert config.kv_cache.page_selection == SparseAttentionConfig(token_budget=512, min_tokens=512)
    assert not config.kv_cache.enable_prefix_caching and config.kv_cache.kv_offload is None

    flags = ("--port", "8000", "--enable-prefix-caching", "--kv-offload", "--lora-modules", "clerk=c")
    settings = serve_settings("--config", str(path), *flags)
    assert (settings.port, settings.name, settings.adapters) == (8000, "my-model", {"clerk": "c"})
    config = EngineConfig.from_fields(**settings.engine)
    assert config.kv_cache.enable_prefix_caching and config.kv_cache.kv_offload is not None

    path.write_text("")
    assert serve_settings("--config", str(path)) == serve_settings() == ServeConfig().resolve("x")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("max_num_seq: 4", "serve.yaml has no key 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("port: 70000", "port of"),
        ("port: 70000", "must be at least 0 and at most 65535, not 70000."),
        ("port: '8000'", "must be an integer, not '8000'."),
        ("kv_cache_gib: .inf", "must be at least 0.0001, not inf."),
        ("kv_cache_dtype: int2", "must be one of model, int8, fp8, int4, int3, not 'int2'."),
        ("device: tpu", "there is no device 'tpu'"),
        ("kv_offload: true", "requires --kv-select pages"),
        ("kv_token_cap: 0", "must be a positive number"),
        ("lora_modules: [poet]", "is not NAME=FOLDER"),
        ("host: 0.0.0.0", "use --api-key-file"),
        ("- port", "must be a mapping"),
        ("port: [", "is not valid YAML"),
    ],
)
def test_a_bad_config_file_is_one_sentence(
    text: str,
    sentence: str,
    smelt_here: Smelt,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("smelt.serve.server.server.serve", lambda _: pytest.fail("the model is being loaded"))
    (tmp_path / "serve.yaml").write_text(text)
    smelt_here("serve", "x", "--config", str(tmp_path / "serve.yaml")).refused(sentence)
    smelt_here("serve", "x", "--config", str(tmp_path / "none.yaml")).refused("there is no server configuration at")


def test_flags_keys_and_schema_are_the_same(smelt_here: Smelt) -> None:  # noqa: F811
    schema = json.loads(smelt_here("schema", "serve").out)
    validator = jsonschema_rs.validator_for(schema)
    validator.validate(load_yaml(CONFIG))
    for content in ({"prot": 1}, {"port": 70000}, {"kv_cache_dtype": "int2"}):
        assert not validator.is_valid(content)
    words = set(smelt_here("serve", "--help").out.replace("/", " ").replace(":", " ").split())
    words = {word.rstrip(".,") for word in words}
    flags = {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    assert set(schema["properties"]) == {flag for flag in flags if not flag.startswith("no_")} - {"config", "help"}
    dtypes = schema["properties"]["kv_cache_dtype"]["anyOf"][0]["enum"]
    assert tuple(dtypes) == KV_CACHE_DTYPES


def test_a_vision_model_is_one_sentence(smelt_here: Smelt, tmp_path: Path) -> None:  # noqa: F811
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=16
    )
    hf.ViTForImageClassification(config).save_pretrained(tmp_path)
    smelt_here("serve", str(tmp_path), "--port", "0").refused("language models and text encoders can be served")


def test_the_engine_imports_nothing_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("safetensors", "torch", "smelt"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")

    async def main() -> None:
        client = EngineClient("/there/is/nothing")
        with pytest.raises(Exception, match="no model at /there/is/nothing"):
            await client.start()
        await client.stop(PATIENCE)
        assert client.process is not None and client.process.returncode == 2

    asyncio.run(main())


def test_settings_print_as_the_call_that_makes_them() -> None:
    assert repr(ServerSettings("x", port=1)).startswith("ServerSettings(model='x', name='', host='127.0.0.1', port=1")
