"""`smelt serve MODEL --kv-profile PROFILE`: the same API, and a conversation's next turn computes only what is new."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from smelt.kvcache.eviction.profile import EvictionProfile, KVShape
from tests.serve.server_process import start


def written(folder: Path, layers: int = 3) -> Path:
    shape = KVShape("llama", layers, 2, 8)
    means = tuple((0.4, 0.1) for _ in range(layers))
    none = tuple((0.0, 0.0) for _ in range(layers))
    profile = EvictionProfile(shape, "keydiff", 0.25, 1, means, none, {"sink": 4, "window": 16}).with_clusters(2)
    profile.save(folder / "tiny.kv.json")
    return folder / "tiny.kv.json"


def test_a_conversation_over_http(model_folder: Path, tmp_path: Path) -> None:
    options = ("--kv-profile", str(written(tmp_path)), "--kv-cache-dtype", "int8", "--kv-cache-gib", "0.02")
    server = start(model_folder, tmp_path, *options)
    try:
        assert server.get("/state").json()["backend"].endswith("per-head cache, int8 KV cache")
        text = "once upon a time there was a cache that forgot what nobody looked at. " * 8
        first = server.complete(text, max_tokens=8, ignore_eos=True)
        second_turn = server.complete(text, max_tokens=8, ignore_eos=True)
        assert second_turn["choices"][0]["text"] == first["choices"][0]["text"]
        assert second_turn["usage"]["prompt_tokens_details"]["cached_tokens"] == len(text) - 1
        more = server.complete(text + first["choices"][0]["text"] + " and then?", max_tokens=4, ignore_eos=True)
        assert more["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(text) - 1
        assert server.get("/state").json()["blocks_used"] == 0
    finally:
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_a_profile_of_another_model_is_one_sentence(model_folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "smelt.cli.main",
        "serve",
        str(model_folder),
        "--kv-profile",
        str(written(tmp_path, layers=4)),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    message = " ".join(ended.stderr.split())
    assert (
        "the profile is of a llama with 4 layers, 2 KV heads and head_dim 8" in message and "Traceback" not in message
    )
