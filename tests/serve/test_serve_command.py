"""`smelt serve` before a model is loaded: flags, their old names, and options that cannot work."""

from __future__ import annotations

import asyncio
import socket
import warnings
from pathlib import Path

import pytest
import transformers as hf

from smelt.cli.app import RENAMED_FLAGS, with_new_flags
from smelt.serve.server.service import Service
from smelt.serve.server.settings import ServerSettings
from smelt.serve.worker.client import EngineClient
from tests.cli.conftest import Smelt, smelt_here  # noqa: F401
from tests.serve.server_process import PATIENCE


@pytest.mark.parametrize("command", RENAMED_FLAGS)
def test_old_flags_are_rewritten_with_a_warning(command: str) -> None:
    for old, new in RENAMED_FLAGS[command].items():
        with pytest.warns(UserWarning, match=f"{old} is now {new};"):
            assert with_new_flags([command, "x", old, "7"]) == [command, "x", new, "7"]
        with pytest.warns(UserWarning, match=f"{old} is now {new};"):
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
    assert command != "serve" or "smelt[cluster]" in text


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
