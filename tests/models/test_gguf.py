"""GGUF: block formats against the reference package, networks and tokenizers against their sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from smelt.errors import ModelError
from smelt.models.bundled import ensure_bundled
from smelt.models.gguf import gguf_config, gguf_tensors, gguf_tokenizer, read_gguf
from smelt.models.gguf.blocks import FORMATS, dequantize
from smelt.models.gguf.llama import BLOCK_NAMES
from smelt.models.load import load
from tests.models.gguf_files import Gguf, Tensor, matrix

_SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_GEMMA3_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: FORMATS[kind].name)
def test_blocks_match_the_reference_package(kind: int) -> None:
    reference = pytest.importorskip("gguf.quants")
    block_format = FORMATS[kind]
    blocks = np.random.default_rng(kind).integers(0, 256, (7 * 5, block_format.bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # random scales include infinities
        ours = dequantize(blocks.reshape(-1), block_format, (7, 5 * block_format.weights))
        reference_values = reference.dequantize(blocks, reference.GGMLQuantizationType(kind))
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours.ravel(), np.asarray(reference_values, dtype=np.float32).ravel())


def test_a_block_by_hand() -> None:
    """Q4_0: scale 0.5; the first byte holds weight 0 in its low half and weight 16 in its high half."""
    block = np.zeros(18, dtype=np.uint8)
    block[:2] = np.array([0.5], dtype="<f2").view(np.uint8)
    block[2:] = 0x88
    block[2] = 0xF1
    weights = dequantize(block, FORMATS[2], (32,))
    assert weights[0] == -3.5
    assert weights[16] == 3.5
    assert np.count_nonzero(weights) == 2


def test_chunked_dequantization_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = np.random.default_rng(0).integers(0, 60, 34 * 101, dtype=np.uint8)
    full = dequantize(blocks, FORMATS[8], (101, 32))
    monkeypatch.setattr("smelt.models.gguf.blocks._WEIGHTS_PER_CHUNK", 96)
    np.testing.assert_array_equal(dequantize(blocks, FORMATS[8], (101, 32)), full)


def _paired(weights: np.ndarray, heads: int) -> np.ndarray:
    """Permute q and k as llama.cpp's converter does: the halves of a head are interleaved."""
    halves = weights.reshape(heads, 2, -1, weights.shape[-1])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def _as_gguf(network: PreTrainedModel, metadata: dict[str, Any] | None = None) -> Gguf:
    """Write the network as GGUF with llama.cpp's names and order."""
    config = network.config
    arch = config.model_type.removesuffix("_text")
    gemma3 = arch == "gemma3"
    rope = config.rope_parameters["full_attention"] if gemma3 else config.rope_parameters
    file = Gguf(
        {
            "general.architecture": arch,
            f"{arch}.block_count": config.num_hidden_layers,
            f"{arch}.context_length": config.max_position_embeddings,
            f"{arch}.embedding_length": config.hidden_size,
            f"{arch}.feed_forward_length": config.intermediate_size,
            f"{arch}.attention.head_count": config.num_attention_heads,
            f"{arch}.attention.head_count_kv": config.num_key_value_heads,
            f"{arch}.attention.key_length": config.head_dim,
            f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{arch}.rope.freq_base": rope["rope_theta"],
            **(metadata or {}),
        }
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {
        name: tensor.numpy() + (1 if gemma3 and name.endswith("norm.weight") else 0)
        for name, tensor in network.state_dict().items()
    }
    file.tensors = [matrix("token_embd.weight", state["model.embed_tokens.weight"])]
    file.tensors.append(matrix("output_norm.weight", state["model.norm.weight"]))
    if not config.tie_word_embeddings:
        file.tensors.append(matrix("output.weight", state["lm_head.weight"]))
    for block in range(config.num_hidden_layers):
        for our_name, gguf_name in {**BLOCK_NAMES, **(_GEMMA3_NORMS if gemma3 else {})}.items():
            for part in ("weight", "bias"):
                values = state.get(f"model.layers.{block}.{gguf_name}.{part}")
                if values is None:
                    continue
                if arch == "llama" and our_name in heads:
                    values = _paired(values, heads[our_name])
                file.tensors.append(matrix(f"blk.{block}.{our_name}.{part}", values))
    return file


def _random_network(config: Any) -> PreTrainedModel:
    network = AutoModelForCausalLM.from_config(config).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # norms and biases too, so that swapping them shows
    return network


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_a_network_round_trips_through_gguf(config_class: Any, tied: bool, tmp_path: Path) -> None:
    config = config_class(
        **_SIZES,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
    )
    network = _random_network(config)
    loaded = load(_as_gguf(network).write(tmp_path / "tiny.gguf"))
    ids = torch.arange(20)[None]
    assert loaded.network.config.rms_norm_eps == 1e-5
    assert loaded.network.config.tie_word_embeddings is tied
    assert loaded.tokenizer is None
    assert loaded.network.dtype == torch.float32 and not loaded.network.training
    torch.testing.assert_close(loaded.network(ids).logits, network(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("layers", [6, 62])
def test_gemma_3_round_trips_through_gguf(layers: int, tmp_path: Path) -> None:
    """The size of 62 layers has an attention scale of its own."""
    sizes = {**_SIZES, "num_hidden_layers": layers, "head_dim": 16, "query_pre_attn_scalar": 16 if layers == 6 else 8}
    full = {"rope_theta": 5000.0, "rope_type": "linear", "factor": 8.0}
    local = {"rope_theta": 200.0, "rope_type": "default"}
    config = Gemma3TextConfig(
        **sizes, sliding_window=5, rope_parameters={"full_attention": full, "sliding_attention": local}
    )
    network = _random_network(config)
    metadata = {
        "gemma3.attention.sliding_window": 5,
        "gemma3.rope.freq_base_swa": 200.0,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    loaded = load(_as_gguf(network, metadata).write(tmp_path / "tiny.gguf")).network
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, network(ids).logits, rtol=1e-4, atol=1e-4)
    assert loaded.config.query_pre_attn_scalar == config.query_pre_attn_scalar


def test_rotary_factors_of_llama3(tmp_path: Path) -> None:
    rotary = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {**_SIZES, "head_dim": 64, "max_position_embeddings": 131072}
    network = _random_network(LlamaConfig(**sizes, rope_parameters=rotary))
    plain = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    factors = plain / network.model.rotary_emb.inv_freq.numpy()  # transformers' own arithmetic is the reference
    file = _as_gguf(network)
    file.tensors.append(matrix("rope_freqs.weight", factors))
    loaded = load(file.write(tmp_path / "tiny.gguf"))
    assert loaded.network.config.rope_parameters == rotary
    file.tensors[-1] = matrix("rope_freqs.weight", factors * np.linspace(1, 1.1, 32))
    with pytest.raises(ModelError, match="rotary factors"):
        load(file.write(tmp_path / "odd.gguf"))


def test_yarn_and_unknown_scaling(tmp_path: Path) -> None:
    network = _random_network(Qwen2Config(**_SIZES))
    yarn = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0}
    yarn["qwen2.rope.scaling.original_context_length"] = 16
    config = gguf_config(read_gguf(_as_gguf(network, yarn).write(tmp_path / "yarn.gguf")))
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.rope_parameters["factor"] == 4.0
    assert config.rope_parameters["original_max_position_embeddings"] == 16
    other = _as_gguf(network, {**yarn, "qwen2.rope.scaling.type": "longrope"}).write(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="longrope"):
        gguf_config(read_gguf(other))


def test_quantized_tensors_are_dequantized(tmp_path: Path) -> None:
    network = _random_network(LlamaConfig(**{**_SIZES, "intermediate_size": 64}))
    file = _as_gguf(network)
    index = next(i for i, tensor in enumerate(file.tensors) if tensor.name == "blk.1.ffn_down.weight")
    blocks = np.random.default_rng(0).integers(0, 60, (64, 18), dtype=np.uint8)
    file.tensors[index] = Tensor("blk.1.ffn_down.weight", [64, 32], blocks.tobytes(), kind=2)
    loaded = load(file.write(tmp_path / "mixed.gguf"))
    expected = dequantize(blocks.ravel(), FORMATS[2], (32, 64))
    np.testing.assert_array_equal(loaded.network.model.layers[1].mlp.down_proj.weight.detach().numpy(), expected)


def test_missing_or_unknown_fields_are_reported(tmp_path: Path) -> None:
    network = _random_network(LlamaConfig(**_SIZES))
    file = _as_gguf(network)
    lost = [tensor for tensor in file.tensors if tensor.name != "blk.1.attn_v.weight"]
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.v_proj\.weight is missing"):
        load(Gguf(file.metadata, lost).write(tmp_path / "lost.gguf"))
    extra = [*file.tensors, matrix("blk.0.ffn_gate_exps.weight", np.zeros((2, 2)))]
    with pytest.raises(ModelError, match="ffn_gate_exps"):
        load(Gguf(file.metadata, extra).write(tmp_path / "extra.gguf"))
    with pytest.raises(ModelError, match="'gpt2'; Smelt reads llama"):
        load(Gguf({**file.metadata, "general.architecture": "gpt2"}, file.tensors).write(tmp_path / "gpt2.gguf"))
    with pytest.raises(ModelError, match=r"q_proj\.weight is \[32, 32\], but"):
        load(Gguf({**file.metadata, "llama.attention.head_count": 2}, file.tensors).write(tmp_path / "heads.gguf"))


def _byte_level_file(pre: str | None, path: Path) -> Path:
    alphabet = sorted(ByteLevel.alphabet())
    merges = ["1 2", "12 3", "3 4", "Ġ a", "b c"]
    tokens = ["<|end|>", "<tool>", *alphabet, *(merge.replace(" ", "") for merge in merges)]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return Gguf(metadata).write(path)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        (None, ["Ġa", "Ġ", "123", "4", "Ġ", "Ċ"]),
        ("gpt-2", ["Ġa", "Ġ", "123", "4", "Ġ", "Ċ"]),
        ("smollm", ["Ġa", "Ġ", "1", "2", "3", "4", "Ġ", "Ċ"]),
        ("qwen2", ["Ġa", "Ġ", "1", "2", "3", "4", "Ġ", "Ċ"]),
        ("llama-bpe", ["<|end|>", "Ġa", "Ġ", "123", "4", "Ġ", "Ċ"]),
    ],
)
def test_text_is_pre_tokenized_as_the_file_says(pre: str | None, expected: list[str], tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(read_gguf(_byte_level_file(pre, tmp_path / "t.gguf")))
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens(tokenizer(" a 1234 \n")["input_ids"]) == expected


def test_llama3_splits_digits_in_threes_from_the_left(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(read_gguf(_byte_level_file("llama-bpe", tmp_path / "t.gguf")))
    assert tokenizer is not None
    assert tokenizer.tokenize("51234") == ["5", "12", "34"]  # 512 and 34, not 5, 123, 4


def test_special_tokens_and_template(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(read_gguf(_byte_level_file("smollm", tmp_path / "t.gguf")))
    assert tokenizer is not None
    assert tokenizer.tokenize("bc<|end|><tool>é") == ["bc", "<|end|>", "<tool>", "Ã", "©"]
    ids = tokenizer("bc<|end|><tool>é 你")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "bc<tool>é 你"
    assert tokenizer.eos_token == "<|end|>" and tokenizer.eos_token_id == 0
    assert tokenizer.pad_token is None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_an_unknown_pre_tokenizer_or_a_broken_merge_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pre-tokenizer 'tekken'; Smelt supports"):
        gguf_tokenizer(read_gguf(_byte_level_file("tekken", tmp_path / "t.gguf")))
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": ["a zzz"]}
    with pytest.raises(ModelError, match="cannot be built"):
        gguf_tokenizer(read_gguf(Gguf(metadata).write(tmp_path / "m.gguf")))


def _sentence_piece_metadata(tokens: list[str], kinds: list[int], scores: list[float]) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentence_piece_by_hand(tmp_path: Path) -> None:
    """'abc' can become ab+c or a+bc; the better score of 'bc' wins. Unknown text falls back to bytes."""
    vocabulary = ["bc", "ab", "▁", "a", "b", "c"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *vocabulary]
    token_types = [2, 3, 3] + [6] * 256 + [1] * len(vocabulary)
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(vocabulary))]
    file = Gguf(_sentence_piece_metadata(tokens, token_types, scores)).write(tmp_path / "spm.gguf")
    tokenizer = gguf_tokenizer(read_gguf(file))
    assert tokenizer is not None
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc é")["input_ids"]) == [
        *("<s>", "▁", "a", "bc", "▁", "<0xC3>", "<0xA9>"),
    ]
    assert tokenizer.decode(tokenizer("abc é")["input_ids"], skip_special_tokens=True) == "abc é"


@pytest.mark.shared
def test_a_real_small_llama_with_its_tokenizer(shared: Path, tmp_path: Path) -> None:
    """stories260K round-trips through GGUF: same IDs, logits and generated text."""
    folder = shared / "weights" / "stories260K"
    original = load(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in state["model"]["merges"]]
    rank: dict[str, int] = {}
    for number, (left, right) in enumerate(merges):
        rank.setdefault(left + right, number)
    scores = [-float(rank.get(token, len(merges))) for token in tokens]
    token_types = [2, 3, 3] + [6 if token.startswith("<0x") else 1 for token in tokens[3:]]
    file = _as_gguf(original.network, _sentence_piece_metadata(tokens, token_types, scores))
    loaded = load(file.write(tmp_path / "stories.gguf"))
    assert original.tokenizer is not None and loaded.tokenizer is not None
    for text in ["Once upon a time, there was a little girl named Lily.", "  two  spaces\nünïcode 你好", ""]:
        assert loaded.tokenizer(text)["input_ids"] == original.tokenizer(text)["input_ids"]
    ids = original.tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(loaded.network(ids).logits, original.network(ids).logits, rtol=0, atol=0)
    assert "Lily" in loaded.generate("Once upon a time", 40)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    try:
        return ensure_bundled("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))


def test_smollm2_matches_its_known_outputs(smollm2: Path) -> None:
    model = load("smollm2-135m")
    config = model.network.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.tie_word_embeddings
    assert sum(parameter.numel() for parameter in model.network.parameters()) == 134_515_008
    assert model.network.generation_config.eos_token_id == 2
    assert model.tokenizer is not None
    assert model.tokenizer.tokenize("In 1984 it\n\n") == ["In", "Ġ", "1", "9", "8", "4", "Ġit", "ĊĊ"]
    assert "Paris" in model.generate("The capital of France is", 5)
    question = [{"role": "user", "content": "hi"}]
    assert "<|im_start|>user\nhi<|im_end|>" in model.tokenizer.apply_chat_template(question, tokenize=False)


def test_smollm2_weights_lie_on_the_grid_of_their_file(smollm2: Path) -> None:
    """The warning in `bundled` holds: 16 levels in each group of 32 inputs."""
    weight = load("smollm2-135m").network.model.layers[3].mlp.down_proj.weight.detach()
    groups = weight[:50].reshape(-1, 32)
    assert max(len(group.unique()) for group in groups) <= 16


def test_tensors_are_read_one_by_one(tmp_path: Path) -> None:
    network = _random_network(LlamaConfig(**_SIZES))
    file = read_gguf(_as_gguf(network).write(tmp_path / "tiny.gguf"))
    tensors = gguf_tensors(file, gguf_config(file))
    assert set(tensors) == {name for name, _ in network.named_parameters()}
    for name, parameter in network.named_parameters():
        assert torch.equal(tensors[name], parameter), name
