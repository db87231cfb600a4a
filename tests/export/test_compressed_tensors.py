"""compressed-tensors export: our reader and the reference restore the model; the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

from smelt.errors import FormatError, ModelError
from smelt.export import export
from smelt.export.compressed_tensors import layer_tensors
from smelt.kernels.dispatch import use_backend
from smelt.models.load import load, load_config, skeleton
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear, quantized_layers
from smelt.numerics.catalog import get_format
from smelt.numerics.format import QuantizedTensor, QuantParams
from tests.export.quantized_models import encoder, logits, network, quantized, scheme, tokens

# The name, its scheme, and the expected format of the folder.
SCHEMES: dict[str, tuple[QuantizationScheme, str]] = {
    "w4": (scheme("int4/32"), "pack-quantized"),
    "w4-asym": (scheme("int4-asym/32@float16"), "pack-quantized"),
    "w3-straddling": (scheme("int3/16@float16"), "pack-quantized"),
    "w5-asym-channel": (scheme("int5-asym"), "pack-quantized"),
    "w2-tensor": (scheme("int2/tensor"), "pack-quantized"),
    "w8": (scheme("int8"), "pack-quantized"),
    "w8a8-dynamic": (scheme("int8", "int8-wide"), "int-quantized"),
    "int8-asymmetric-rows": (scheme("int8-asym/row"), "pack-quantized"),
    "int8-asymmetric-groups": (scheme("int8-asym/32"), "pack-quantized"),
    "w8a8-asymmetric-rows": (scheme("int8-asym/row", "int8-wide"), "int-quantized"),
    "w8a8-static": (scheme("int8", "int8", static=True), "int-quantized"),
    "w4a8": (scheme("int4-asym/32", "int8-wide"), "int-quantized"),
    "fp8-dynamic": (scheme("fp8-e4m3", "fp8-e4m3"), "float-quantized"),
    "fp8-static": (scheme("fp8-e4m3/tensor", "fp8-e4m3", static=True), "float-quantized"),
    "fp8-weights": (scheme("fp8-e4m3"), "float-quantized"),
    "nvfp4": (scheme("nvfp4"), "nvfp4-pack-quantized"),
    "mxfp4": (scheme("mxfp4"), "mxfp4-pack-quantized"),
    "mxfp4-both": (scheme("mxfp4-up", "mxfp4-up"), "mxfp4-pack-quantized"),
}
FOUR_BIT_FLOATS = ("nvfp4", "mxfp4", "mxfp4-both")  # the reference reader computes these in bfloat16


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return drop


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", SCHEMES)
def test_our_reader_restores_the_same_layers_and_logits(name: str, tmp_path: Path) -> None:
    chosen, storage = SCHEMES[name]
    model = quantized(network(num_hidden_layers=1), chosen)
    result = export(model, "compressed-tensors", tmp_path / "out")
    assert result["tensors"] == {storage: 7}
    read = load(tmp_path / "out")
    assert len(quantized_layers(read.network)) == 7
    with use_backend("reference"):
        assert torch.equal(logits(read.network), logits(model.network))


@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the real reader is not installed: smeltml[compressed-tensors]")
    dtype = torch.bfloat16 if name in FOUR_BIT_FLOATS else torch.float32
    model = quantized(network(dtype=dtype, num_hidden_layers=1), SCHEMES[name][0])
    export(model, "compressed-tensors", tmp_path / "out")
    reference = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert reference.dtype == dtype
    with use_backend("reference"):
        torch.testing.assert_close(logits(reference), logits(model.network), atol=1e-5, rtol=0)


def test_transformers_rounds_only_scales_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    """A bfloat16 model with float16 scales: kept in the folder, rounded by the reader, and reported."""
    pytest.importorskip("compressed_tensors", reason="the real reader is not installed: smeltml[compressed-tensors]")
    model = quantized(network(dtype=torch.bfloat16), scheme("int4/32@float16"))
    result = export(model, "compressed-tensors", tmp_path / "out")
    assert any("bfloat16" in note for note in result["notes"])
    reference = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with use_backend("reference"):
        far = (logits(reference) - logits(model.network)).abs().max()
        effect = (logits(network(dtype=torch.bfloat16)) - logits(model.network)).abs().max()
    assert far < effect / 8


def test_packed_words_by_hand() -> None:
    """4-bit codes 0 to 7 pack into 0x76543210; zero points are packed along columns."""
    form = get_format("int4-asym")
    codes = torch.arange(8, dtype=torch.uint8).expand(8, 8)
    zeros = torch.arange(8).flip(0).float().reshape(8, 1, 1)
    matrix = QuantizedTensor(form, codes, QuantParams(torch.ones(8, 1, 1), zeros))
    layer = QuantizedLinear.from_quantized(matrix, QuantizationScheme(form), bias=None, dtype=torch.float32)
    tensors = layer_tensors(layer, torch.float32)
    assert tensors["weight_packed"].tolist() == [[0x76543210]] * 8
    assert tensors["weight_zero_point"].tolist() == [[0x01234567]]
    assert tensors["weight_shape"].tolist() == [8, 8]


@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_words_match_the_library(bits: int) -> None:
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason="not installed")
    layer = quantized(network(num_hidden_layers=1), scheme(f"int{bits}-asym/32")).network.model.layers[0].mlp.down_proj
    tensors = layer_tensors(layer, torch.float32)
    codes = layer.packed.unpack().codes.short() - (1 << (bits - 1))
    assert torch.equal(packing.pack_to_int32(codes.to(torch.int8), bits), tensors["weight_packed"])
    zeros = layer.packed.tensors["zero"].squeeze(-1).short() - (1 << (bits - 1))
    reference_values = packing.pack_to_int32(zeros.to(torch.int8), bits, packed_dim=0)
    assert torch.equal(reference_values, tensors["weight_zero_point"].contiguous())


def mixed(path: str) -> QuantizationScheme | None:
    if "o_proj" in path:
        return None
    return scheme("int8") if "down_proj" in path else scheme("int4/32")


def test_mixed_schemes_become_groups_that_name_their_layers(tmp_path: Path) -> None:
    model = quantized(network(), mixed)
    export(model, "compressed-tensors", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert sorted(len(group["targets"]) for group in said["config_groups"].values()) == [2, 10]
    assert said["ignore"] == ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj", "lm_head"]
    with use_backend("reference"):
        assert torch.equal(logits(load(tmp_path / "out").network), logits(model.network))
    pytest.importorskip("compressed_tensors", reason="the real reader is not installed: smeltml[compressed-tensors]")
    reference = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with use_backend("reference"):
        torch.testing.assert_close(logits(reference), logits(model.network), atol=1e-5, rtol=0)


def test_two_storage_formats_are_mixed_precision(tmp_path: Path) -> None:
    model = quantized(network(), lambda path: scheme("fp8-e4m3") if "down" in path else scheme("int4/32"))
    export(model, "compressed-tensors", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["format"] == "mixed-precision"
    with use_backend("reference"):
        assert torch.equal(logits(load(tmp_path / "out").network), logits(model.network))


def test_an_encoder_with_biases_and_its_head(tmp_path: Path) -> None:
    model = quantized(encoder(), scheme("int4/32"))
    export(model, "compressed-tensors", tmp_path / "out")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["ignore"] == ["bert.pooler.dense", "classifier"]
    with use_backend("reference"):
        assert torch.equal(logits(load(tmp_path / "out").network), logits(model.network))


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    model = quantized(network(tie_word_embeddings=True), scheme("int8"))
    export(model, "compressed-tensors", tmp_path / "out")
    read = load(tmp_path / "out").network
    assert read.lm_head.weight.data_ptr() == read.model.embed_tokens.weight.data_ptr()


def test_config_and_skeleton_of_an_exported_folder(tmp_path: Path) -> None:
    export(quantized(network(), scheme("int4/32")), "compressed-tensors", tmp_path / "out")
    assert load_config(tmp_path / "out").hidden_size == 64
    outline = skeleton(tmp_path / "out")
    assert len(quantized_layers(outline)) == 14 and all(t.is_meta for t in outline.state_dict().values())


def test_reading_in_another_dtype_keeps_the_codes(tmp_path: Path) -> None:
    model = quantized(network(), scheme("int4/32"))
    export(model, "compressed-tensors", tmp_path / "out")
    read = load(tmp_path / "out", dtype=torch.bfloat16).network
    assert read.lm_head.weight.dtype == torch.bfloat16
    path = "model.layers.0.mlp.down_proj"
    assert torch.equal(read.get_submodule(path).weight, model.network.get_submodule(path).weight)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (scheme("dint4/32"), "two codes near zero"),
        (scheme("amxfp4"), "no scheme"),
        (scheme("nf4"), "no scheme"),
        (scheme("fp8-e5m2"), "no scheme"),
        (scheme("int4-float-zero/32"), "zero points are not integers"),
        (scheme("nvfp4", "nvfp4"), "global scale of the inputs"),
        (scheme("int4/64"), "last group"),
        (scheme("int8", "int4"), "quantizes its inputs to int4"),
        (scheme("int8", "fp8-e4m3"), "a pair that no reader"),
        (scheme("int8", "int8", clip=0.9), "clips the range"),
        (scheme("int8", hadamard=True), "rotates its inputs"),
    ],
)
def test_unsupported_schemes_are_refused(chosen: QuantizationScheme, words: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=words):
        export(quantized(network(), chosen), "compressed-tensors", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_low_rank_factors_are_refused(tmp_path: Path) -> None:
    model = quantized(network(), scheme("int4/32"))
    layer = next(iter(quantized_layers(model.network).values()))
    layer.add_low_rank_factors(torch.zeros(2, layer.in_features), torch.zeros(layer.out_features, 2))
    with pytest.raises(FormatError, match="low-rank factors"):
        export(model, "compressed-tensors", tmp_path / "out")


def test_a_model_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not quantized"):
        export(Model(network()), "compressed-tensors", tmp_path / "out")


def test_conv1d_is_refused(tmp_path: Path) -> None:
    config = hf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=99, n_positions=64)
    model = hf.GPT2LMHeadModel(config).eval()
    chosen = scheme("int8")
    attention = model.transformer.h[0].attn
    matrix = chosen.weight.quantize(attention.c_attn.weight.detach().T.contiguous())
    attention.c_attn = QuantizedLinear.from_quantized(matrix, chosen, bias=attention.c_attn.bias, dtype=torch.float32)
    with pytest.raises(FormatError, match="Conv1D"):
        export(Model(model), "compressed-tensors", tmp_path / "out")


class TestDamage:
    """An untrusted folder raises one sentence, never loads a wrong network."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        export(quantized(network(), scheme("int4-asym/32", "int8-wide")), "compressed-tensors", tmp_path / "out")
        return tmp_path / "out"

    def test_codes_outside_their_bit_width(self, folder: Path) -> None:
        rewritten(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(100))
        with pytest.raises(ModelError, match="do not fit into 4 bits"):
            load(folder)

    def test_a_missing_scale(self, folder: Path) -> None:
        rewritten(folder, without("model.layers.0.mlp.up_proj.weight_scale"))
        with pytest.raises(ModelError, match=r"lack model.layers.0.mlp.up_proj.weight_scale"):
            load(folder)

    def test_missing_codes(self, folder: Path) -> None:
        rewritten(folder, without("model.layers.1.mlp.up_proj.weight"))
        with pytest.raises(ModelError, match=r"lack model.layers.1.mlp.up_proj.weight"):
            load(folder)

    def test_a_missing_plain_tensor(self, folder: Path) -> None:
        rewritten(folder, without("model.norm.weight"))
        with pytest.raises(ModelError, match=r"lack model.norm.weight"):
            load(folder)

    def test_codes_of_another_shape_or_dtype(self, folder: Path) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        rewritten(folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
        with pytest.raises(ModelError, match=r"I8 \[95, 64\] and not I8 \[96, 64\]"):
            load(folder)
        rewritten(folder, lambda tensors: tensors.update({name: torch.zeros(96, 64)}))
        with pytest.raises(ModelError, match="F32"):
            load(folder)

    def test_a_truncated_file(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        with pytest.raises(ModelError, match="cut off"):
            load(folder)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda said: said.pop("config_groups"), "no config_groups"),
            (lambda said: said.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
            (lambda said: said.update(ignore=["Linear"]), "no linear layer is a target"),
            (lambda said: said.update(ignore=["re:(a*)*b"]), "pattern"),
            (lambda said: said.update(ignore=["re:.*.*.*.*.*x"]), "pattern"),
            (lambda said: said.update(ignore=["re:("]), "pattern"),
            (lambda said: said["config_groups"]["group_0"].update(targets=7), "not a list of names"),
            (lambda said: said["config_groups"]["group_0"].update(weights=None), "no weights"),
            (lambda said: said["config_groups"]["group_0"]["weights"].update(num_bits=9), "weights quantized as"),
            (lambda said: said["config_groups"]["group_0"]["weights"].update(group_size=48), "groups of 48|and not"),
            (lambda said: said["config_groups"]["group_0"]["weights"].update(actorder="group"), "weights quantized"),
            (lambda said: said["config_groups"]["group_0"].update(format="marlin-24"), "weights quantized as"),
            (lambda said: said["config_groups"]["group_0"]["input_activations"].update(num_bits=4), "inputs quantized"),
        ],
    )
    def test_a_config_that_contradicts_the_tensors(self, folder: Path, change: Any, words: str) -> None:
        edited(folder, change)
        with pytest.raises(ModelError, match=words):
            load(folder)


def test_patterns_and_presets_of_other_tools_are_read(tmp_path: Path) -> None:
    """Folders from other tools name their targets by patterns."""
    model = quantized(network(), lambda path: scheme("int4/32") if "mlp" in path else None)
    export(model, "compressed-tensors", tmp_path / "out")

    def patterns(said: dict[str, Any]) -> None:
        said["ignore"] = ["re:.*self_attn.*", "lm_head"]
        said["config_groups"]["group_0"]["targets"] = ["re:.*(gate|up|down)_proj$"]

    edited(tmp_path / "out", patterns)
    with use_backend("reference"):
        assert torch.equal(logits(load(tmp_path / "out").network, tokens()), logits(model.network))
