"""Headers, indexes and metadata that would take much more memory or time than their files have bytes."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from smelt.models.gguf import gguf_tokenizer, read_gguf
from smelt.models.json_file import MAX_VALUES, parse_object
from smelt.models.load import load, skeleton
from smelt.models.lora import CONFIG as ADAPTER_CONFIG
from smelt.models.lora import WEIGHTS as ADAPTER_WEIGHTS
from smelt.models.lora import read_lora
from smelt.models.weights import INDEX, check_safetensors, read_headers
from tests.models.gguf_files import Gguf, text
from tests.security.limits import refused, write_model

_STRING, _ARRAY = 8, 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def _header(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _empty_lists(size: int) -> bytes:
    return b'{"a":[' + b"[]," * (size // 3) + b"[]]}"


@pytest.mark.parametrize("megabytes", [99, 31, 4])
def test_a_header_of_empty_lists(megabytes: int, folder: Path) -> None:
    """99 MB took 2.5 GB: an empty list is 3 bytes in the file and 64 in memory."""
    (folder / "model.safetensors").write_bytes(_header(_empty_lists(megabytes * 10**6)))
    sentence = refused(lambda: load(folder))
    assert "header" in sentence and ("at most" in sentence or "JSON values" in sentence)


def test_a_header_of_too_many_tensors(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    raw = json.dumps({f"t{index}": entry for index in range(200_000)}).encode()
    (folder / "model.safetensors").write_bytes(_header(raw))
    assert "JSON values" in refused(lambda: read_headers(folder)) and len(raw) < 32 * 2**20


def test_a_header_of_many_tensors_is_read(folder: Path) -> None:
    """The largest published files have some ten thousand tensors."""
    entry = {"dtype": "BF16", "shape": [0, 7168], "data_offsets": [0, 0]}
    raw = json.dumps({f"model.layers.{i}.mlp.experts.{i}.up.weight": entry for i in range(50_000)}).encode()
    (folder / "model.safetensors").write_bytes(_header(raw))
    assert len(check_safetensors(folder / "model.safetensors")) == 50_000


@pytest.mark.parametrize(
    "raw",
    [b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", b'{"a":' * 100 + b"1" + b"}" * 100],
    ids=["lists", "objects"],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "smelt.json"])
def test_deep_nesting(raw: bytes, name: str, folder: Path) -> None:
    (folder / name).write_bytes(raw)
    assert f"{name} is nested more than 64 levels deep" in refused(lambda: load(folder))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "smelt.json"])
@pytest.mark.parametrize("raw", [_empty_lists(60 * 10**6), b" " * (70 * 2**20)], ids=["values", "bytes"])
def test_huge_json_files(raw: bytes, name: str, folder: Path) -> None:
    (folder / name).write_bytes(raw)
    sentence = refused(lambda: load(folder))
    assert name in sentence and "of a model" in sentence


def test_json_up_to_the_limits_is_read() -> None:
    nested = b'{"a":' + b"[" * 62 + b"]" * 62 + b"}"
    assert parse_object(nested, "x")
    assert len(parse_object(b'{"a":[' + b"0," * (MAX_VALUES - 3) + b"0]}", "x")["a"]) == MAX_VALUES - 2


# ---- indexes and what their names point to ----


def _index(folder: Path, names: list[str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(names)}}))


def test_an_index_of_thousands_of_shards(folder: Path) -> None:
    _index(folder, [f"{i}.safetensors" for i in range(5_000)])
    assert "names 5000 files; at most 4096" in refused(lambda: load(folder))


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_fifo, _zeros, _loop, _directory])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "shard.safetensors", "adapter"])
def test_pipes_devices_and_loops_in_place_of_files(make: Callable[[Path], None], name: str, folder: Path) -> None:
    """Opening a pipe would wait for ever, and /dev/zero has no end."""
    if name == "shard.safetensors":
        _index(folder, [name])
    if name == "adapter":
        (folder / ADAPTER_CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
        network = load(folder).network
        make(folder / ADAPTER_WEIGHTS)
        refused(lambda: read_lora(folder, network, network.dtype, network.device))
        make_config = folder / "other"
        make_config.mkdir()
        make(make_config / ADAPTER_CONFIG)
        refused(lambda: read_lora(make_config, network, network.dtype, network.device))
        return
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    assert str(folder) in refused(lambda: load(folder))


@pytest.mark.parametrize("name", ["smelt.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_an_optional_file_that_is_a_pipe_is_not_opened(name: str, folder: Path) -> None:
    os.mkfifo(folder / name)
    assert load(folder).tokenizer is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_a_link_to_a_file_outside_shows_nothing_of_it(name: str, folder: Path, tmp_path: Path) -> None:
    """Links are followed, since the cache of the hub consists of them; what is behind one is not shown."""
    (tmp_path / "secret").write_text('root:TOPSECRET:0 {"TOPSECRET": 1}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    assert "TOPSECRET" not in refused(lambda: load(folder))


# ---- GGUF ----


def _strings(key: str, count: int) -> bytes:
    """A metadata pair with an array of empty strings."""
    return text(key) + struct.pack("<IIQ", _ARRAY, _STRING, count) + bytes(8 * count)


def test_gguf_strings_are_counted_over_all_arrays(tmp_path: Path) -> None:
    """1,000 arrays of a million empty strings are one sparse file of 8 GB; each alone would be within the limit."""
    pairs = b"".join(_strings(str(index), 2**18) for index in range(5))
    path = Gguf(raw_pairs=pairs, pair_count=5).write(tmp_path / "x.gguf")
    assert "strings in arrays" in refused(lambda: read_gguf(path), cpu_seconds=60)


@pytest.mark.parametrize("size", [2**27, 2**33])
def test_gguf_text_is_limited(size: int, tmp_path: Path) -> None:
    """A sparse file may claim a string of gigabytes and take no space on disk."""
    path = Gguf(raw_pairs=text("k") + struct.pack("<IQ", _STRING, size), pair_count=1).write(tmp_path / "x.gguf")
    os.truncate(path, path.stat().st_size + size)
    headroom = size + 512 * 2**20  # the file itself is mapped
    assert "its strings have more than" in refused(lambda: read_gguf(path), headroom=headroom)


def test_gguf_vocabularies_of_long_tokens(tmp_path: Path) -> None:
    """SentencePiece tokens are split at each position."""
    tokens = [f"{index:0250d}" for index in range(40_000)]
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens}
    path = Gguf({**metadata, "tokenizer.ggml.scores": [0.0] * len(tokens)}).write(tmp_path / "x.gguf")
    file = read_gguf(path)
    assert "characters" in refused(lambda: gguf_tokenizer(file))


# ---- sizes in config.json ----


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3_moe", "num_experts": 4096, "num_hidden_layers": 1000},
        {"model_type": "mixtral", "num_local_experts": 4096, "num_hidden_layers": 9},
        {"model_type": "resnet", "depths": [1000] * 1000},
        {"model_type": "resnet", "hidden_sizes": [8] * 2000, "depths": [1] * 2000},
        {"hidden_size": float("nan")},
        {"hidden_size": float("inf")},
        {"vocab_size": 2**40},
        {"num_hidden_layers": -1},
        {"hidden_size": {"a": 1}},
        {"architectures": 7},
        {"hidden_act": []},
    ],
    ids=str,
)
def test_sizes_that_would_build_millions_of_modules(changes: dict[str, object], folder: Path) -> None:
    """A skeleton is built before any weight is seen, so that the config alone must be bounded."""
    write_model(folder, **changes)
    refused(lambda: load(folder))
    assert str(folder) in refused(lambda: skeleton(folder))
