"""Where Ray is not installed the command says what to install, and nothing else needs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.train.loop.runs import language, write_config

ABSENT = "import sys; sys.modules['ray'] = None; from smelt.train.on_ray import main; main(sys.argv[1:])"


def test_without_ray_the_command_says_what_to_install(tmp_path: Path) -> None:
    config = write_config(tmp_path / "small.yaml", language(tmp_path))
    words = [sys.executable, "-c", ABSENT, str(config), "--workers", "2", "--out", str(tmp_path / "run")]
    found = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert found.returncode == 2
    assert found.stderr == "smelt: Ray is not installed here; `pip install 'smelt[ray]'`.\n"
    assert not (tmp_path / "run").exists()
