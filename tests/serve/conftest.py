"""Servers shared by several test files. Their shutdown is tested as well."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.serve.server_process import NAME, PATIENCE, Server, start, write_model

if TYPE_CHECKING:
    import openai  # tests of kernels run without it, too

KEYS = ("first-key-of-the-test", "second-key-of-the-test")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture(scope="session")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server on loopback without an API key."""
    running = start(model_folder, tmp_path_factory.mktemp("server"), "--kv-cache-gib", "0.02", "--client-timeout", "1")
    yield running
    running.wait_until_idle()
    assert running.end(signal.SIGINT) == 0, running.log.read_text()


@pytest.fixture(scope="session")
def keyed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server on every address, with two keys, a small queue, and no restart of its engine."""
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text("# two keys\n" + "\n".join(KEYS) + "\n")
    options = ("--max-queued", "0", "--max-num-seqs", "2", "--kv-cache-gib", "0.01", "--max-restarts", "0")
    running = start(model_folder, folder, "--api-key-file", str(folder / "keys"), *options, host="0.0.0.0")
    yield running
    worker = running.get("/state", headers={"x-api-key": KEYS[0]}).json()["worker"]
    os.kill(worker, signal.SIGKILL)
    assert running.process.wait(PATIENCE) == 1, running.log.read_text()
    assert "giving up" in running.log.read_text() and "Traceback" not in running.log.read_text()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as connected:
        yield connected
