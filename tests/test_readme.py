"""The commands of the README and of the tour can be pasted in order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# After a server is started in the background, wait until it answers, as a person would.
WAIT = f"""{shlex.quote(sys.executable)} - <<'PYTHON'
import time, urllib.request
for _ in range(600):
    try:
        urllib.request.urlopen("http://127.0.0.1:PORT/health").close()
        break
    except OSError:
        time.sleep(0.5)
else:
    raise SystemExit("the server does not answer")
PYTHON"""


def commands(page: str, heading: str) -> list[str]:
    """Return the lines of the first shell block under a heading."""
    section = re.search(rf"^{heading}$.*?^```sh\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    assert section is not None, f"{page} has no block of commands"
    return section[1].splitlines()


def script(lines: list[str], port: int) -> str:
    """Return the lines as one script that names each line and stops at the first that fails."""
    written = ["set -eu -o pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for line in lines:
        command = line.replace("8000", str(port))
        written += [f"echo {shlex.quote('>>> ' + line)} >&2", command]
        if re.search(r"&\s*(#.*)?$", command):
            written.append(WAIT.replace("PORT", str(port)))
    return "\n".join(written)


def test_a_failing_line_stops_the_script_and_is_named() -> None:
    done = subprocess.run(["bash", "-c", script(["true", "false  # fails", "echo later"], 1)], capture_output=True)
    assert done.returncode == 1 and done.stdout == b"" and done.stderr.endswith(b">>> false  # fails\n")


def paste(lines: list[str], folder: Path) -> None:
    """Run the lines in a folder with the examples, as with an installed `smelt`."""
    binaries = folder / "bin"
    binaries.mkdir()
    (binaries / "smelt").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m smelt.cli.main "$@"\n')
    (binaries / "smelt").chmod(0o755)
    shutil.copytree(ROOT / "examples", folder / "work" / "examples")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-c", script(lines, port)], cwd=folder / "work", env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_quickstart_can_be_pasted(tmp_path: Path) -> None:
    """With the bundled model, as tests have no network; the server runs in the background."""
    lines = [line.replace("Qwen/Qwen3-0.6B", "smollm2-135m") for line in commands("README.md", "## Quickstart")]
    paste([line.replace("smelt serve small ", "smelt serve small --port 8000 & ") for line in lines], tmp_path)
    for made in ("small/report.html", "small-vllm/config.json"):
        assert (tmp_path / "work" / made).is_file(), made


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_tour_can_be_pasted(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes a key, is not installed")
    paste(commands("docs/tour.md", "# A tour of the commands"), tmp_path)
    for made in ("small/report.html", "small/model.sig", "small.gguf", "smollm2.kv.json", "runs/bytes/report.html"):
        assert (tmp_path / "work" / made).is_file(), made
