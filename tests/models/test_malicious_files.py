"""Malicious files: each raises one clear sentence at once, without large allocations or running code."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM

from smelt.errors import ModelError
from smelt.models.load import load, skeleton
from smelt.models.weights import check_safetensors, read_safetensors
from tests.models.gguf_files import Gguf, Tensor, matrix, text, value

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
_HEADROOM = 512 * 2**20
_TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int8)}


@pytest.fixture(scope="module")
def weights() -> bytes:
    network = LlamaForCausalLM(LlamaConfig(**_CONFIG))
    return save({name: parameter.detach() for name, parameter in network.named_parameters()})


@pytest.fixture
def folder(tmp_path: Path, weights: bytes) -> Path:
    """A small valid model; loading it once keeps imports out of the timings."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(_CONFIG))
    (tmp_path / "model" / "model.safetensors").write_bytes(weights)
    load(tmp_path / "model")
    return tmp_path / "model"


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit address space to half a gigabyte more than in use: larger allocations fail even if untouched."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _HEADROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _refused(action: Callable[[], object]) -> str:
    """Return the error message of the action, checking that it took little time and memory."""
    start = time.process_time()  # CPU time of this process: other load does not count
    with _limited_memory(), pytest.raises(ModelError) as caught:
        action()
    seconds = time.process_time() - start
    sentence = str(caught.value)
    assert seconds < 1, f"took {seconds:.1f} s"
    assert "\n" not in sentence and len(sentence) < 600
    assert "alloc" not in sentence and "memory" not in sentence, sentence
    return sentence


# ---- safetensors ----


def _raw(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def _tensor_header(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


_FITS = "header does not fit"
_JSON = "not valid JSON"
_SHAPE = "impossible shape"
_BYTES = "which does not match its shape and dtype"
_ORDER = "overlaps another or leaves a gap"
_TWICE = (
    b'{"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}}'
)
_DEEP = b'{"a":{"dtype":' + b"[" * 900 + b"]" * 900 + b',"shape":[1],"data_offsets":[0,4]}}'
_BAD_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", _FITS),
    "shorter than a length": (b"\x01\x02", _FITS),
    "header longer than the file": (_raw(_tensor_header(), bytes(24), length=10**6), _FITS),
    "header length huge": (_raw(_tensor_header(), bytes(24), length=2**63), _FITS),
    "header not JSON": (_raw(b"{not json", bytes(24)), _JSON),
    "header not UTF-8": (_raw(b'{"\xff": 1}', bytes(24)), _JSON),
    "header a list": (_raw([1, 2], bytes(24)), "JSON list"),
    "header nested without end": (_raw(b'{"a":' * 50_000, bytes(24)), _JSON),
    "number of many digits": (
        _raw(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'),
        _JSON,
    ),
    "entry not an object": (_raw({"a": 5}, bytes(24)), "must have a dtype"),
    "entry without a shape": (_raw({"a": {"dtype": "F32", "data_offsets": [0, 24]}}, bytes(24)), "must have a dtype"),
    "unknown dtype": (_raw(_tensor_header(dtype="F31"), bytes(24)), "dtype 'F31'"),
    "dtype not a text": (_raw(_tensor_header(dtype=["F32"]), bytes(24)), "dtype of type list"),
    "dtype nested deeply": (_raw(_DEEP, bytes(4)), "nested more than 64 levels"),
    "negative dimension": (_raw(_tensor_header(shape=(-2, -3)), bytes(24)), _SHAPE),
    "fractional dimension": (_raw(_tensor_header(shape=(2.0, 3)), bytes(24)), _SHAPE),
    "true as a dimension": (_raw(_tensor_header(shape=(True, 6)), bytes(24)), _SHAPE),
    "dimensions that overflow": (_raw(_tensor_header(shape=(2**62, 2**62)), bytes(24)), _BYTES),
    "thousands of dimensions": (_raw(_tensor_header(shape=[1] * 5000, offsets=(0, 4)), bytes(4)), _SHAPE),
    "shape and bytes differ": (_raw(_tensor_header(shape=(2, 4)), bytes(24)), _BYTES),
    "offsets swapped": (_raw(_tensor_header(offsets=(24, 0)), bytes(24)), _BYTES),
    "offset negative": (_raw(_tensor_header(offsets=(-24, 0)), bytes(24)), "impossible data_offsets"),
    "offset beyond the file": (_raw(_tensor_header(offsets=(1000, 1024)), bytes(24)), _ORDER),
    "three offsets": (_raw(_tensor_header(offsets=(0, 24, 24)), bytes(24)), "impossible data_offsets"),
    "cut off": (_raw(_tensor_header(), bytes(20)), "cut off or damaged"),
    "bytes too many": (_raw(_tensor_header(), bytes(25)), "cut off or damaged"),
    "overlap": (
        _raw({**_tensor_header(), "b": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}, bytes(24)),
        _ORDER,
    ),
    "gap": (_raw(_tensor_header(offsets=(4, 28)), bytes(28)), _ORDER),
    "key twice": (_raw(_TWICE, bytes(24)), "a key appears twice"),
}


@pytest.mark.parametrize("case", _BAD_SAFETENSORS)
def test_bad_safetensors(case: str, folder: Path) -> None:
    raw, cause = _BAD_SAFETENSORS[case]
    (folder / "model.safetensors").write_bytes(raw)
    sentence = _refused(lambda: check_safetensors(folder / "model.safetensors"))
    assert "model.safetensors" in sentence and cause in sentence, sentence
    assert _refused(lambda: read_safetensors(folder / "model.safetensors")) == sentence
    assert _refused(lambda: load(folder)) == sentence


def test_good_safetensors_pass_the_check(tmp_path: Path) -> None:
    """Empty tensors, scalars and metadata must pass the check."""
    tensors = {**_TENSORS, "empty": torch.empty(0, 5), "scalar": torch.tensor(1.0), "half": torch.ones(3).bfloat16()}
    (tmp_path / "x.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    headers = check_safetensors(tmp_path / "x.safetensors")
    assert headers["a"].shape == (2, 3) and headers["empty"].shape == (0, 5) and headers["scalar"].shape == ()
    read = read_safetensors(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 199), byte=st.integers(0, 255), length=st.integers(0, 250))
def test_flipped_bytes_in_safetensors(position: int, byte: int, length: int, tmp_path: Path) -> None:
    raw = bytearray(save(_TENSORS))
    raw[position % len(raw)] = byte
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw[:length] if length < 40 else raw)
    try:
        read_safetensors(path)
    except ModelError as error:
        assert "\n" not in str(error)


# ---- pickles and what runs code ----


class _Bomb:
    """Unpickling this creates a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_only_pickles(name: str, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(_Bomb(tmp_path / "marker")))
    sentence = _refused(lambda: load(folder))
    assert f"holds only pickled weights ({name}), which can run code when opened; convert it" in sentence
    assert "give the model's folder" in _refused(lambda: load(folder / name))
    assert not (tmp_path / "marker").exists()


def test_a_pickle_under_another_name(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(_Bomb(tmp_path / "marker")) + bytes(200))
    assert "not a safetensors file" in _refused(lambda: load(folder))
    assert not (tmp_path / "marker").exists()


def test_a_pickle_beside_the_weights_is_never_opened(folder: Path, tmp_path: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(tmp_path / "marker")))
    load(folder)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "target",
    ["../../etc/passwd", "../model/model.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", "..", 7, None],
)
def test_an_index_that_escapes_the_folder(target: object, folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": target}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "not a safetensors file in this folder" in _refused(lambda: load(folder))


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"{{{{"])
def test_a_broken_index(index: bytes, folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_bytes(index)
    assert "index.json" in _refused(lambda: load(folder))


def test_a_tensor_in_two_shards(folder: Path, weights: bytes) -> None:
    (folder / "copy.safetensors").write_bytes(weights)
    index = {"weight_map": {"a": "model.safetensors", "b": "copy.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "in more than one file" in _refused(lambda: load(folder))


def _code_that_marks(folder: Path, marker: Path) -> None:
    for name in ("configuration_evil.py", "modeling_evil.py", "tokenization_evil.py"):
        (folder / name).write_text(f"import os\nos.mkdir({str(marker)!r})\nclass Evil: pass\n")


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_code_beside_a_model_is_never_run(model_type: str, folder: Path, tmp_path: Path) -> None:
    _code_that_marks(folder, tmp_path / "marker")
    auto_map = {
        "AutoConfig": "configuration_evil.Evil",
        "AutoModel": "modeling_evil.Evil",
        "AutoModelForCausalLM": "modeling_evil.Evil",
    }
    (folder / "config.json").write_text(json.dumps({**_CONFIG, "model_type": model_type, "auto_map": auto_map}))
    if model_type == "llama":  # transformers supports it, so its own code is used
        assert type(load(folder).network) is LlamaForCausalLM
    else:
        assert "never runs code" in _refused(lambda: load(folder))
    assert not (tmp_path / "marker").exists()


def test_code_of_a_tokenizer_is_never_run(folder: Path, tmp_path: Path) -> None:
    _code_that_marks(folder, tmp_path / "marker")
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert "tokenizer" in _refused(lambda: load(folder))
    assert not (tmp_path / "marker").exists()


def test_an_adapter_does_not_load_another_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "evil/model"}))
    load(folder)


@pytest.mark.parametrize(
    "field",
    [
        "_attn_implementation_internal",
        "_experts_implementation_internal",
        "_attn_implementation",
        "attn_implementation",
        "experts_implementation",
        "transformers_weights",
        "fusion_config",
        "distributed_config",
        "_name_or_path",
        "__class__",
    ],
)
def test_instructions_in_a_config_are_dropped(field: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**_CONFIG, field: "evil/kernel"}))
    config = load(folder).network.config
    assert "evil" not in json.dumps(config.to_dict(), default=str)
    assert config._attn_implementation == "sdpa"


# ---- config.json ----


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1, 2]", b"7", b"null", b"\xff\xfe", b'{"a": ' * 20_000, b'{"a": 1, "a": 2}']
)
def test_a_config_that_is_not_an_object(raw: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(raw)
    assert "config.json" in _refused(lambda: load(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": None},
        {"model_type": "unheard-of"},
        {"model_type": ["llama"]},
        {"hidden_size": -1},
        {"hidden_size": 0},
        {"hidden_size": 10**12},
        {"hidden_size": 2**200},
        {"hidden_size": "16"},
        {"hidden_size": 16.5},
        {"hidden_size": True},
        {"hidden_size": [16, 10**12]},
        {"hidden_size": 2**20},
        {"intermediate_size": 2**20},
        {"vocab_size": 10**9},
        {"vocab_size": 2**24},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 40},
        {"num_attention_heads": 0},
        {"num_attention_heads": 3},
        {"num_key_value_heads": 4096},
        {"max_position_embeddings": 10**18},
        {"num_labels": 10**9},
        {"rope_parameters": {"rope_type": "evil"}},
        {"rope_parameters": 5},
        {"quantization_config": {"quant_method": "gptq"}},
        {"hidden_act": "evil"},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"to_dict": 5, "hidden_act": 5},
    ],
    ids=lambda changes: "-".join(f"{key}={value!r:.20}" for key, value in changes.items()),
)
def test_a_config_that_contradicts_the_weights(changes: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **changes}))
    _refused(lambda: load(folder))


@pytest.mark.parametrize("changes", [{"architectures": None}, {"dtype": "load"}, {"dtype": ["x"]}])
def test_a_config_with_irrelevant_nonsense(changes: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **changes}))
    assert load(folder).network.dtype == torch.float32


def test_a_skeleton_of_a_large_model_is_cheap(folder: Path) -> None:
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps({**_CONFIG, **sizes}))
    with _limited_memory():
        assert sum(parameter.numel() for parameter in skeleton(folder).parameters()) > 10**10


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "generation_config.json"])
@pytest.mark.parametrize(
    "raw", [b"{", b"[]", b"\xff\x00", b'{"model": {"type": "BPE", "vocab": 5}, "added_tokens": 3}']
)
def test_broken_files_beside_the_weights(name: str, raw: bytes, folder: Path) -> None:
    (folder / name).write_bytes(raw)
    try:
        load(folder)
    except ModelError as error:
        assert "\n" not in str(error)


# ---- GGUF ----


def _gguf(**changes: Any) -> Gguf:
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (8, 16),
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
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab"],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -4.0, -3.0, -2.0, -1.0, 0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata.update(changes.pop("metadata", {}))
    tensors = [matrix(name, random.normal(size=shape)) for name, shape in shapes.items()]
    return Gguf(metadata, [*tensors, *changes.pop("extra", [])], **changes)


def _array(kind: int, length: int, content: bytes = b"") -> bytes:
    return text("x") + struct.pack("<IIQ", 9, kind, length) + content


def _extra(*shape: int, kind: int = 0, data: bytes = bytes(64), offset: int | None = None, name: str = "x") -> Gguf:
    return _gguf(extra=[Tensor(name, shape, data, kind, offset)])


def _with_pair(raw: bytes) -> Gguf:
    return _gguf(pair_count=15, raw_pairs=raw)


_BAD_GGUF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cut off"),
    "only the magic": (b"GGUF", "cut off"),
    "wrong magic": (_gguf(magic=b"GGML").to_bytes(), "does not begin with GGUF"),
    "version 1": (_gguf(version=1).to_bytes(), "version is 1"),
    "version 99": (_gguf(version=99).to_bytes(), "version is 99"),
    "big-endian": (_gguf(version=0x03000000).to_bytes(), "version is"),
    "2**60 tensors": (_gguf(tensor_count=2**60).to_bytes(), "tensors"),
    "many tensors": (_gguf(tensor_count=2**15).to_bytes(), "usable"),
    "2**60 pairs": (_gguf(pair_count=2**60).to_bytes(), "metadata pairs"),
    "text of 2**62 bytes": (_with_pair(struct.pack("<Q", 2**62)).to_bytes(), "cut off"),
    "text of 2**64 - 1 bytes": (_with_pair(struct.pack("<Q", 2**64 - 1)).to_bytes(), "cut off"),
    "text not UTF-8": (_with_pair(struct.pack("<Q", 2) + b"\xff\xfe").to_bytes(), "UTF-8"),
    "array of 2**62 numbers": (_with_pair(_array(4, 2**62)).to_bytes(), "cut off"),
    "array of 2**62 texts": (_with_pair(_array(8, 2**62)).to_bytes(), "strings in arrays"),
    "array of half a million texts": (_with_pair(_array(8, 2**19)).to_bytes(), "cut off"),
    "array of arrays": (_with_pair(_array(9, 1, struct.pack("<IQ", 9, 1) * 10_000)).to_bytes(), "unsupported type 9"),
    "array of nothing known": (_with_pair(_array(77, 1)).to_bytes(), "unsupported type 77"),
    "value of no known type": (_with_pair(text("x") + struct.pack("<I", 99)).to_bytes(), "unknown type 99"),
    "key twice": (_with_pair(text("llama.block_count") + value(1)).to_bytes(), "twice"),
    "alignment 0": (_gguf(metadata={"general.alignment": 0}).to_bytes(), "alignment"),
    "alignment 12": (_gguf(metadata={"general.alignment": 12}).to_bytes(), "alignment"),
    "alignment 2**31": (_gguf(metadata={"general.alignment": 2**31}).to_bytes(), "alignment"),
    "alignment a text": (_gguf(metadata={"general.alignment": "32"}).to_bytes(), "alignment"),
    "no dimension": (_extra().to_bytes(), "0 dimensions"),
    "five dimensions": (_extra(1, 1, 1, 1, 1).to_bytes(), "5 dimensions"),
    "a dimension of 0": (_extra(0, 4).to_bytes(), "impossible shape"),
    "dimensions that overflow": (_extra(2**32, 2**32).to_bytes(), "impossible shape"),
    "dimensions that wrap to 4": (_extra(2**62 + 1, 4).to_bytes(), "impossible shape"),
    "a row of half a block": (_extra(48, 1, kind=2).to_bytes(), "impossible shape"),
    "unknown tensor type": (_extra(4, kind=99).to_bytes(), "type 99"),
    "unsupported tensor type": (_extra(256, kind=10).to_bytes(), "type 10"),
    "offset beyond the file": (_extra(4, offset=2**40).to_bytes(), "outside of the file"),
    "offset that wraps": (_extra(4, offset=2**64 - 32).to_bytes(), "outside of the file"),
    "offset off the alignment": (_extra(4, offset=8).to_bytes(), "alignment"),
    "tensor larger than the file": (_extra(2**40).to_bytes(), "outside of the file"),
    "tensor twice": (_extra(16, name="output_norm.weight").to_bytes(), "twice"),
    "tensors that overlap": (_extra(4, offset=0).to_bytes(), "overlaps"),
    "cut off in the tensors": (_gguf().to_bytes()[:-100], "outside of the file"),
    "cut off in the header": (_gguf().to_bytes()[:300], "cut off"),
    "another architecture": (_gguf(metadata={"general.architecture": "evil"}).to_bytes(), "architecture 'evil'"),
    "architecture a number": (_gguf(metadata={"general.architecture": 7}).to_bytes(), "architecture 7"),
    "no heads": (_gguf(metadata={"llama.attention.head_count": 0}).to_bytes(), "head_count"),
    "heads a list": (_gguf(metadata={"llama.attention.head_count": [2, 2]}).to_bytes(), "head_count"),
    "four billion blocks": (_gguf(metadata={"llama.block_count": 2**32 - 1}).to_bytes(), "num_hidden_layers"),
    "a hundred blocks": (_gguf(metadata={"llama.block_count": 100}).to_bytes(), "describes 100 blocks"),
    "wide claim": (_gguf(metadata={"llama.feed_forward_length": 2**20}).to_bytes(), "the config expects"),
    "epsilon not a number": (
        _gguf(metadata={"llama.attention.layer_norm_rms_epsilon": float("nan")}).to_bytes(),
        "epsilon",
    ),
    "theta negative": (_gguf(metadata={"llama.rope.freq_base": -1.0}).to_bytes(), "freq_base"),
    "tokens numbers": (_gguf(metadata={"tokenizer.ggml.tokens": [1, 2]}).to_bytes(), "without tokens"),
    "types too few": (_gguf(metadata={"tokenizer.ggml.token_type": [1]}).to_bytes(), "token_type"),
    "scores too few": (_gguf(metadata={"tokenizer.ggml.scores": [1.0]}).to_bytes(), "score"),
    "a token without end": (
        _gguf(metadata={"tokenizer.ggml.tokens": [*"abcdefg", "x" * 10**6]}).to_bytes(),
        "characters",
    ),
    "tokenizer of another kind": (_gguf(metadata={"tokenizer.ggml.model": "bert"}).to_bytes(), "type 'bert'"),
}


@pytest.fixture(scope="module", autouse=True)
def _valid_gguf(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The file that all invalid ones derive from is valid."""
    model = load(_gguf().write(tmp_path_factory.mktemp("gguf") / "good.gguf"))
    assert model.tokenizer is not None
    assert model.tokenizer("ab")["input_ids"] == [1, 7]


@pytest.mark.parametrize("case", _BAD_GGUF)
def test_bad_gguf(case: str, tmp_path: Path) -> None:
    raw, cause = _BAD_GGUF[case]
    (tmp_path / "bad.gguf").write_bytes(raw)
    sentence = _refused(lambda: load(tmp_path / "bad.gguf"))
    assert "bad.gguf" in sentence
    assert cause in sentence, sentence


def test_special_ids_outside_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    path = _gguf(metadata={"tokenizer.ggml.eos_token_id": 10**6}).write(tmp_path / "x.gguf")
    model = load(path)
    assert model.network.config.eos_token_id is None or model.network.config.eos_token_id < 8
    assert model.tokenizer is not None and model.tokenizer.eos_token is None


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 1599), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.one_of(st.none(), st.integers(0, 4000)),
)
def test_flipped_bytes_in_gguf(flips: list[tuple[int, int]], cut: int | None, tmp_path: Path) -> None:
    raw = bytearray(_gguf().to_bytes())
    for position, byte in flips:
        raw[position] = byte
    path = tmp_path / "x.gguf"
    path.write_bytes(raw[:cut])
    try:
        load(path)
    except ModelError as error:
        assert "\n" not in str(error)
