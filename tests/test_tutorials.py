"""Every tutorial runs from its first block to its last, with small models in place of the ones it names."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf

import smelt
from tests.cli.conftest import Smelt, smelt_here  # noqa: F401
from tests.export.byte_tokenizer import byte_level
from tests.tiny import build_network

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
PATIENCE = 300.0  # seconds until a server answers, even on a slow machine
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(smelt.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Save a small language model and a small encoder, with widths that groups of 32 divide."""
    tokenizer = byte_level()
    tokenizer.pad_token = "</s>"
    shape = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512,
        "vocab_size": len(tokenizer), "max_position_embeddings": 1024, "pad_token_id": 1,
    }  # fmt: skip
    decoder = hf.LlamaConfig(**shape, num_key_value_heads=2, head_dim=16, bos_token_id=0, eos_token_id=1)
    networks = {
        "smollm2-135m": build_network(hf.LlamaForCausalLM, decoder),
        "minilm-l6": build_network(hf.BertModel, hf.BertConfig(**shape)),
    }
    for name, network in networks.items():
        network.save_pretrained(tmp_path / "models" / name)
        tokenizer.save_pretrained(tmp_path / "models" / name)
    return {name: str(tmp_path / "models" / name) for name in networks}


class Reader:
    """Does what a reader of a tutorial does, in a folder of its own."""

    def __init__(self, models: dict[str, str], call: Smelt) -> None:
        self.models, self.call = models, call
        self.names: dict[str, object] = {}
        self.server: subprocess.Popen[bytes] | None = None
        self.port = 0

    def do(self, language: str, title: str, text: str) -> None:
        for name, folder in self.models.items():
            text = text.replace(name, folder)
        if title:
            Path(title).write_text(text)
        elif language == "python":
            exec(compile(text, "tutorial", "exec"), self.names)
        elif language == "sh":
            for line in text.replace("\\\n", " ").splitlines():
                self.type(line)

    def type(self, line: str) -> None:
        program, *arguments = shlex.split(line.replace("8000", str(self.port)), comments=True)
        if (program, arguments[0]) == ("smelt", "serve"):
            self.serve(arguments)
        elif program == "smelt":
            done = self.call(*arguments)
            assert done.code == 0, f"{line}\n{done.err}"
        elif program == "torchrun":
            self.run([sys.executable, "-m", "torch.distributed.run", *arguments])
        else:
            assert '"text"' in self.run([program, *arguments])

    def run(self, command: list[str]) -> str:
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def serve(self, arguments: list[str]) -> None:
        """Start the server and wait until it answers; one that runs already is stopped."""
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = [str(self.port) if word == "0" else word for word in arguments]
        self.server = subprocess.Popen([sys.executable, "-m", "smelt.cli.main", *arguments], env=ENVIRONMENT)
        end = time.monotonic() + PATIENCE
        while True:
            assert self.server.poll() is None and time.monotonic() < end, arguments
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.2)

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait(PATIENCE)
        self.server, self.port = None, 0


@pytest.fixture
def reader(
    models: dict[str, str],
    smelt_here: Smelt,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Reader]:
    (tmp_path / "reader").mkdir()
    monkeypatch.chdir(tmp_path / "reader")
    reader = Reader(models, smelt_here)
    yield reader
    reader.close()


def test_there_are_five_tutorials() -> None:
    assert len(TUTORIALS) == 5


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, reader: Reader) -> None:
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert sum(language == "sh" for language, _, _ in blocks) >= 1
    torch.manual_seed(0)
    for language, title, text in blocks:
        reader.do(language, title, text)
