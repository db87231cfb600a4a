"""Clients in JavaScript, unmodified, at a real server; each runs if it is installed: `npm install` in tests/serve/node.

SMELT_NODE_MODULES names another folder with their `node_modules`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.server_process import NAME, Server

pytest.importorskip("llguidance")
SCRIPTS = Path(__file__).parent / "node"
MODULES = Path(os.environ.get("SMELT_NODE_MODULES", SCRIPTS)) / "node_modules"


@pytest.mark.parametrize(("script", "package"), [("openai", "openai"), ("anthropic", "@anthropic-ai/sdk")])
def test_node_client(server: Server, tmp_path: Path, script: str, package: str) -> None:
    node = shutil.which("node")
    if node is None or not (MODULES / package).is_dir():
        pytest.skip(f"needs node, and {package} in {MODULES}")
    (tmp_path / "node_modules").symlink_to(MODULES.resolve())  # modules are looked up beside the script
    shutil.copy(SCRIPTS / f"{script}.mjs", tmp_path)
    command = [node, str(tmp_path / f"{script}.mjs"), server.url, NAME]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and result.stdout == "ok\n", result.stderr
    server.wait_until_idle()
