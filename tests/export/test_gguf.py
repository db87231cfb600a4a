"""GGUF export: readable by Smelt, the `gguf` package, transformers and llama.cpp; the rest is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from smelt.errors import FormatError, ModelError
from smelt.export import export
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.gguf import gguf_config, gguf_tensors, read_gguf
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import quantized_layers
from smelt.models.surgery import keep_units
from tests.character_tokenizer import character_tokenizer
from tests.export.byte_tokenizer import byte_level, pieces
from tests.export.quantized_models import encoder, logits, network, quantized, scheme

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


def export_gguf(model: Model, folder: Path, **options: Any) -> dict[str, Any]:
    return export(model, "gguf", folder / "out", **options)


def tensor_types(file: Path) -> dict[str, str]:
    return {name: entry.format.name for name, entry in read_gguf(file).entries.items()}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "head_dim": 8}),
        ("Mistral", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 32}),
    ],
)
def test_an_unquantized_network_round_trips_bit_for_bit(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = network(kind, **changes)
    export_gguf(Model(model), tmp_path)
    assert torch.equal(logits(load(tmp_path / "out" / "model.gguf").network), logits(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_unchanged(dtype: torch.dtype, tmp_path: Path) -> None:
    model = network(dtype=dtype, num_hidden_layers=1)
    export_gguf(Model(model), tmp_path)
    read = load(tmp_path / "out" / "model.gguf", dtype=dtype).network
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("weight_scheme", "ggml_type"),
    [
        (scheme("int4/32@float16"), "Q4_0"),
        (scheme("int4-wide@float16"), "Q4_0"),
        (scheme("int3/32@float16"), "Q4_0"),
        (scheme("int4-asym/32@float16"), "Q5_0"),
        (scheme("int5@bfloat16"), "Q5_0"),
        (scheme("int8/32@float16"), "Q8_0"),
        (scheme("int6-asym/32@float16"), "Q8_0"),
        (scheme("dint4/32@float16"), "Q8_0"),
        (scheme("ternary@float16"), "Q4_0"),
        (scheme("mxfp4"), "Q5_0"),
        (scheme("int8@float16", "int8"), "Q8_0"),
    ],
)
def test_codes_are_exported_exactly(weight_scheme: QuantizationScheme, ggml_type: str, tmp_path: Path) -> None:
    model = quantized(network(num_hidden_layers=1), weight_scheme)
    export_gguf(model, tmp_path)
    file = tmp_path / "out" / "model.gguf"
    assert tensor_types(file)["blk.0.attn_k.weight"] == tensor_types(file)["blk.0.ffn_down.weight"] == ggml_type
    tensors = gguf_tensors(read_gguf(file), gguf_config(read_gguf(file)))
    for path, layer in quantized_layers(model.network).items():
        assert torch.equal(tensors[f"{path}.weight"], layer.weight), path


def test_a_minimum_that_is_a_float16_is_q4_1(tmp_path: Path) -> None:
    """Scales that are powers of two make every minimum a float16."""
    model = quantized(network(), scheme("int4-asym/32@float16"))
    for layer in quantized_layers(model.network).values():
        layer.scale = torch.exp2(layer.scale.float().log2().round()).half()
    export_gguf(model, tmp_path)
    assert set(tensor_types(tmp_path / "out" / "model.gguf").values()) == {"F32", "Q4_1"}


def test_export_of_an_artifact(tmp_path: Path) -> None:
    """A quantized artifact on disk, as passed to the command, becomes a single file."""
    model = quantized(network(), scheme("int4@float16"))
    (tmp_path / "artifact").mkdir()
    save_artifact(model, tmp_path / "artifact")
    result = export(tmp_path / "artifact", "gguf", tmp_path / "small.gguf")
    assert (tmp_path / "small.gguf").is_file() and result["tensors"]["Q4_0"] == 14
    read = load(tmp_path / "small.gguf").network
    decoded = load_artifact(tmp_path / "artifact").network
    path = "model.layers.1.self_attn.q_proj"
    assert torch.equal(read.get_submodule(path).weight, decoded.get_submodule(path).weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "small.gguf"]


@pytest.mark.parametrize(
    ("asked", "inner", "last"),
    [
        ("f16", "F16", "F16"),
        ("q8_0", "Q8_0", "Q8_0"),
        ("q4_0", "Q4_0", "Q6_K"),
        ("Q4_1", "Q4_1", "Q6_K"),
        ("q4_k", "Q4_K", "Q6_K"),
        ("q6_k", "Q6_K", "Q6_K"),
    ],
)
def test_requested_types(asked: str, inner: str, last: str, tmp_path: Path) -> None:
    model = network(**WIDE)
    export_gguf(Model(model), tmp_path, type=asked)
    types = tensor_types(tmp_path / "out" / "model.gguf")
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == inner
    assert types["output.weight"] == last and types["output_norm.weight"] == "F32"
    far = (logits(load(tmp_path / "out" / "model.gguf").network) - logits(model)).abs().max() / logits(
        model
    ).abs().max()
    assert far < {"F16": 1e-3, "Q8_0": 0.02, "Q6_K": 0.08}.get(inner, 0.3)


def test_rows_not_divisible_by_super_blocks_use_the_next_type(tmp_path: Path) -> None:
    result = export_gguf(Model(network(intermediate_size=256)), tmp_path, type="q4_k")
    types = tensor_types(tmp_path / "out" / "model.gguf")
    assert types["blk.0.ffn_down.weight"] == "Q4_K" and types["blk.0.attn_q.weight"] == "Q5_0"
    assert types["output.weight"] == "Q8_0"
    assert "12 in Q5_0" in result["notes"][0] or "13 in Q5_0" in result["notes"][0]


def test_a_type_for_unquantized_tensors(tmp_path: Path) -> None:
    export_gguf(quantized(network(), scheme("int4/32@float16")), tmp_path, type="q8_0")
    types = tensor_types(tmp_path / "out" / "model.gguf")
    assert types["token_embd.weight"] == "Q8_0" and types["blk.0.attn_q.weight"] == "Q4_0"


@pytest.mark.parametrize(
    ("weight_scheme", "words"),
    [
        (scheme("int4/16@float16"), "groups of 16"),
        (scheme("int4/64@float16"), "groups of 64"),
        (scheme("int4/32"), "not float16 numbers"),
        (scheme("nf4/32@float16"), "not integer multiples"),
        (scheme("amxfp4"), "not integer multiples"),
        (scheme("int4-float-zero/32@float16"), "not integer multiples"),
        (scheme("int8-asym/32@float16"), "which exceeds Q8_0"),
        (scheme("int4/32@float16", hadamard=True), "rotates its inputs"),
    ],
)
def test_a_grid_that_no_type_supports_is_refused(weight_scheme: QuantizationScheme, words: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=words):
        export_gguf(quantized(network(), weight_scheme), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("build_network", "words"),
    [
        (lambda: encoder(), "language models"),
        (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=9)), "not gpt2"),
        (lambda: network(attention_bias=True), "without the bias"),
        (lambda: network(hidden_act="gelu"), "activation silu"),
        (lambda: network(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "'dynamic'"),
    ],
)
def test_a_network_that_gguf_cannot_express_is_refused(build_network: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=words):
        export_gguf(Model(build_network()), tmp_path)


def test_layers_of_different_widths_are_refused(tmp_path: Path) -> None:
    model = Model(network())
    part = next(part for part in model.anatomy.parts if part.kind == "ffn_channels")
    keep_units(model.network, part, range(part.units - 8))
    with pytest.raises(FormatError, match="different widths"):
        export_gguf(model, tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_weights_are_refused(value: float, tmp_path: Path) -> None:
    model = network()
    model.lm_head.weight.data[3, 3] = value
    with pytest.raises(FormatError, match="NaN or infinity"):
        export_gguf(Model(model), tmp_path, type="q8_0")
    assert list(tmp_path.iterdir()) == []


def test_weights_too_large_for_f16_are_refused(tmp_path: Path) -> None:
    model = network()
    model.lm_head.weight.data[3, 3] = 1e6
    with pytest.raises(FormatError, match="too large for f16"):
        export_gguf(Model(model), tmp_path, type="f16")


def test_an_unknown_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no GGUF type 'q9'"):
        export_gguf(Model(network()), tmp_path, type="q9")


@pytest.mark.parametrize(
    "rotary",
    [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda rotary: rotary["rope_type"],
)  # fmt: skip
def test_scaled_rope(rotary: dict[str, Any], tmp_path: Path) -> None:
    model = network(num_hidden_layers=1, head_dim=64, max_position_embeddings=16384, rope_parameters=rotary)
    export_gguf(Model(model), tmp_path)
    assert torch.equal(logits(load(tmp_path / "out" / "model.gguf").network), logits(model))


def test_a_sliding_window_limits_the_context(tmp_path: Path) -> None:
    export_gguf(Model(network("Mistral", sliding_window=40)), tmp_path)
    assert read_gguf(tmp_path / "out" / "model.gguf").metadata["llama.context_length"] == 40


class TestTokenizers:
    @pytest.mark.parametrize(
        ("tokenizer", "kind", "rule"),
        [
            (byte_level(), "gpt2", "smollm"),
            (byte_level(digits=False), "gpt2", "gpt-2"),
            (pieces(), "llama", "default"),
            (pieces(start=False), "llama", "default"),
        ],
        ids=["smollm", "gpt-2", "pieces", "pieces-without-start"],
    )
    def test_the_same_tokens_after_reading(self, tokenizer: Any, kind: str, rule: str, tmp_path: Path) -> None:
        model = Model(network(vocab_size=310), tokenizer)
        export_gguf(model, tmp_path)
        file = read_gguf(tmp_path / "out" / "model.gguf")
        assert file.metadata["tokenizer.ggml.model"] == kind and file.metadata["tokenizer.ggml.pre"] == rule
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 310
        read = load(tmp_path / "out" / "model.gguf").tokenizer
        assert read is not None and read.chat_template == tokenizer.chat_template
        for text in ("in the winter there", "The 1212 things, or: ünïcode <s> </s>!", "  two  spaces\n"):
            assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert (read.bos_token, read.eos_token) == ("<s>", "</s>")

    def test_a_tokenizer_that_is_not_bpe_is_refused_unless_left_out(self, tmp_path: Path) -> None:
        model = Model(network(), character_tokenizer())
        with pytest.raises(FormatError, match="WordLevel; export with --no-tokenizer"):
            export_gguf(model, tmp_path)
        export_gguf(model, tmp_path, tokenizer=False)
        assert load(tmp_path / "out" / "model.gguf").tokenizer is None

    def test_an_unknown_pre_tokenizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="has a pre-tokenizer"):
            export_gguf(Model(network(vocab_size=310), byte_level(regex=False)), tmp_path)

    def test_a_tokenizer_beyond_gguf_is_refused(self, tmp_path: Path) -> None:
        """No pre-tokenizer name implies this normalizer: only reading back detects it."""
        from tokenizers import normalizers

        tokenizer = byte_level()
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
        with pytest.raises(FormatError, match="other tokens"):
            export_gguf(Model(network(vocab_size=310), tokenizer), tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_more_tokens_than_the_network_has(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match="the network only 99"):
            export_gguf(Model(network(), byte_level()), tmp_path)


class TestOtherReaders:
    def test_the_gguf_package(self, tmp_path: Path) -> None:
        gguf = pytest.importorskip("gguf")
        model = Model(quantized(network(vocab_size=310), scheme("int4/32@float16")).network, byte_level())
        export_gguf(model, tmp_path, type="q8_0")
        reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
        ours = read_gguf(tmp_path / "out" / "model.gguf")
        assert reader.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_0
        assert reader.fields["tokenizer.ggml.merges"].contents() == ours.metadata["tokenizer.ggml.merges"]
        assert {tensor.name for tensor in reader.tensors} == set(ours.entries)
        for tensor in reader.tensors:
            reference_values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(
                ours.entries[tensor.name].shape
            )
            assert np.array_equal(reference_values, ours.tensor(tensor.name)), tensor.name

    @pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
    def test_transformers(self, kind: str, tmp_path: Path) -> None:
        pytest.importorskip("gguf")
        pytest.importorskip("accelerate", reason="transformers wants accelerate to read GGUF")
        changes = {"head_dim": 128} if kind == "Qwen3" else {}  # transformers does not read it from the file
        model = network(kind, vocab_size=310, **changes)
        export_gguf(Model(model, byte_level()), tmp_path, type="q8_0")
        reference = hf.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
        )
        ours = load(tmp_path / "out" / "model.gguf").network
        torch.testing.assert_close(logits(reference), logits(ours), atol=1e-6, rtol=0)

    @pytest.mark.parametrize("asked", ["f32", "q8_0", "q4_k"])
    def test_llama_cpp(self, asked: str, tmp_path: Path) -> None:
        """llama.cpp itself: the same tokens, and logits within its quantized arithmetic."""
        llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
        model = network(vocab_size=310, **WIDE)
        tokenizer = byte_level()
        export_gguf(Model(model, tokenizer), tmp_path, type=asked)
        file = tmp_path / "out" / "model.gguf"
        engine = llama_cpp.Llama(str(file), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
        text = "in the winter there are 12 things"
        ids = engine.tokenize(text.encode(), add_bos=False)
        assert ids == tokenizer(text)["input_ids"]
        engine.eval(ids)
        result = torch.from_numpy(np.array(engine.scores[: len(ids)]))
        expected = logits(load(file).network, torch.tensor([ids]))[0]
        assert (result - expected).abs().max() < {"f32": 0.005}.get(asked, 0.05) * expected.abs().max()


def test_the_bundled_model_round_trips(tmp_path: Path) -> None:
    """SmolLM2 came from a Q4_1 file, and its weights are written back unchanged."""
    try:
        model = load("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))
    export_gguf(model, tmp_path, type="q4_1")
    file = read_gguf(tmp_path / "out" / "model.gguf")
    tensors = gguf_tensors(file, gguf_config(file))
    state = model.network.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in tensors.items())
