"""Training on Ray where there is none, or where it was imported before: one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.train.trainer.runs import language, write_config

ABSENT = "import sys; sys.modules['ray'] = None; from smelt.train.on_ray import main; main(sys.argv[1:])"


def test_without_ray_the_command_says_what_to_install(tmp_path: Path) -> None:
    config = write_config(tmp_path / "small.yaml", language(tmp_path))
    words = [sys.executable, "-c", ABSENT, str(config), "--workers", "2", "--out", str(tmp_path / "run")]
    found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert found.returncode == 2
    assert found.stderr == "smelt: Ray is not installed here; `pip install 'smelt[ray]'`.\n"
    assert not (tmp_path / "run").exists()


BEFORE = "import sys, types; ray = sys.modules['ray'] = types.ModuleType('ray'); ray.is_initialized = lambda: False; "


def test_a_ray_that_was_imported_before_is_not_started_open_to_others(tmp_path: Path) -> None:
    config = write_config(tmp_path / "small.yaml", language(tmp_path))
    code = BEFORE + "from smelt.train.on_ray import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", code, str(config), "--workers", "2", "--out", str(tmp_path / "run")]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100, env=mine)
    assert found.returncode == 2
    assert found.stderr.startswith("smelt: ray was imported before") and found.stderr.count("\n") == 1
