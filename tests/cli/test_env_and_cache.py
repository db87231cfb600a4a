"""`smelt env` describes this machine; `smelt cache` lists and removes its own entries only."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch

import smelt
from smelt.cli.env import EXTRAS
from tests.cli.conftest import Smelt

ROOT = Path(__file__).parents[2]


def test_env_describes_this_machine(smelt_here: Smelt, tmp_path: Path) -> None:
    done = smelt_here("env", "--json", str(tmp_path / "env.json"))
    content = json.loads((tmp_path / "env.json").read_text())
    assert content["machine"]["smelt"] == smelt.__version__ and content["packages"]["torch"] == torch.__version__
    assert len(content["gpus"]) == torch.cuda.device_count()
    for shown in (torch.__version__, content["machine"]["cpu"], content["kernels"]["CPU"], *content["cpu_features"]):
        assert shown in done.out


def test_env_says_when_kernels_are_not_compiled(smelt_here: Smelt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMELT_COMPILE", "0")
    assert "PyTorch only" in smelt_here("env").out


def test_env_knows_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"dev", "cluster"}  # for developers; serve and ray together


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path))
    for name, number in (("models/x-1/model.safetensors", 3000), ("kernels/smelt-1.so", 500), ("diary.txt", 7)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\0" * number)
    return tmp_path


def test_the_cache_is_listed(cache: Path, smelt_here: Smelt, tmp_path: Path) -> None:
    done = smelt_here("cache", "list", "--json", str(tmp_path / "r.json"))
    entries = json.loads((tmp_path / "r.json").read_text())["entries"]
    assert [(entry["kind"], entry["name"], entry["bytes"]) for entry in entries] == [
        ("models", "x-1", 3000),
        ("kernels", "smelt-1.so", 500),
    ]
    assert "x-1" in done.out and "diary" not in done.out


def test_clearing_removes_what_is_named_and_nothing_else(cache: Path, smelt_here: Smelt) -> None:
    smelt_here("cache", "clear", "kernel").refused("did you mean 'kernels'?")
    assert "removed 1 entries" in smelt_here("cache", "clear", "kernels").out
    assert (cache / "models" / "x-1").is_dir() and not list((cache / "kernels").iterdir())
    smelt_here("cache", "clear")
    assert not list((cache / "models").iterdir()) and (cache / "diary.txt").is_file()


def test_an_empty_cache(smelt_here: Smelt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path / "none"))
    assert "0 entries" in smelt_here("cache", "list").out
