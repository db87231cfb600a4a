"""Training on Ray where it is not installed, or was already imported: one sentence."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

from smelt.train.on_ray import main
from tests.train.trainer.runs import language, run_command, write_config


def main_without_ray(words: list[str]) -> None:
    sys.modules["ray"] = None  # type: ignore[assignment]
    main(words)


def main_after_importing_ray(words: list[str]) -> None:
    ray = sys.modules["ray"] = types.ModuleType("ray")
    ray.is_initialized = lambda: False  # type: ignore[attr-defined]
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    main(words)


def test_without_ray_the_error_says_what_to_install(tmp_path: Path) -> None:
    config = write_config(tmp_path / "small.yaml", language(tmp_path))
    arguments = [str(config), "--workers", "2", "--out", str(tmp_path / "run")]
    ((code, stderr),) = run_command(1, arguments, tmp_path, main_without_ray)
    assert code == 2
    assert stderr == "smelt: Ray is not installed here; `pip install 'smeltml[ray]'`.\n"
    assert not (tmp_path / "run").exists()


def test_an_already_imported_ray_is_not_started_open_to_the_network(tmp_path: Path) -> None:
    config = write_config(tmp_path / "small.yaml", language(tmp_path))
    arguments = [str(config), "--workers", "2", "--out", str(tmp_path / "run")]
    ((code, stderr),) = run_command(1, arguments, tmp_path, main_after_importing_ray)
    assert code == 2
    assert stderr.startswith("smelt: ray was imported before") and stderr.count("\n") == 1
