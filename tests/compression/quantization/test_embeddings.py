"""Quantized token embeddings: lookups, storage, what refuses them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from smelt.compression.base import MethodContext
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.errors import FormatError, ModelError, RecipeError
from smelt.export.compressed_tensors import CompressedTensors
from smelt.measure.cost import count_bytes, count_parameters
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedEmbedding, quantized_layers
from smelt.models.quantized_network import quantized_replacement
from smelt.numerics import get_format
from smelt.serve.engine.engine import Engine
from smelt.serve.engine.sampling_params import SamplingParams
from tests.architectures import ARCHITECTURES
from tests.tiny import BUILDS

IDS = torch.tensor([[5, 2, 9, 2], [0, 98, 7, 5]])


def quantized(network: Any = "bert", **settings: object) -> Model:
    model = Model(BUILDS[network]() if isinstance(network, str) else network)
    RoundToNearest(bits=8, group_size=-1, symmetric=True, **settings).apply(model, MethodContext())  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("name", ["int8", "int8-asym/16", "int4/16", "fp8-e4m3/tensor", "nvfp4"])
def test_a_lookup_gives_the_rows_of_the_dequantized_table(name: str) -> None:
    table = nn.Embedding(99, 32)
    matrix = get_format(name).quantize(table.weight.detach())
    layer = quantized_replacement(table, QuantizationScheme(get_format(name)))
    layer.set_tensors(matrix, None)
    assert torch.equal(layer(IDS), matrix.dequantize()[IDS])
    assert layer.to(torch.bfloat16)(IDS).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_encoder_with_quantized_embeddings_reloads(tmp_path: Path, dtype: torch.dtype | None) -> None:
    dense, model = BUILDS["bert"](), quantized(embeddings="int8")
    (path,) = [path for path, layer in quantized_layers(model.network).items() if isinstance(layer, QuantizedEmbedding)]
    assert path.endswith("word_embeddings") and count_parameters(model.network) == count_parameters(dense)
    table = dense.get_input_embeddings().weight
    assert count_bytes(quantized().network) - count_bytes(model.network) == 3 * table.numel() - 4 * len(table)
    save_artifact(model, tmp_path)
    loaded = load_artifact(tmp_path, dtype=dtype).network
    expected = copy.deepcopy(model.network).to(loaded.dtype) if dtype is None else loaded
    with torch.no_grad():
        logits = loaded(IDS)[0]
        assert logits.dtype == loaded.dtype and torch.equal(logits, expected(IDS)[0])


def test_a_head_that_shares_the_table_is_quantized_with_it(tmp_path: Path) -> None:
    """Stored, counted and kept in memory once; after a move to another dtype as well."""
    dense, model = BUILDS["llama-tied"](), quantized("llama-tied", embeddings="int8")
    head, table = model.network.get_output_embeddings(), model.network.get_input_embeddings()
    assert head.codes is table.codes and count_parameters(model.network) == count_parameters(dense)
    save_artifact(model, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "model.embed_tokens.codes" in names and not any(name.startswith("lm_head") for name in names)
    for dtype in (None, torch.bfloat16):
        loaded = load_artifact(tmp_path, dtype=dtype).network
        assert loaded.get_output_embeddings().codes is loaded.get_input_embeddings().codes  # type: ignore[union-attr]
    with torch.no_grad():
        assert torch.equal(load_artifact(tmp_path).network(IDS).logits, model.network(IDS).logits)
        rounded = model.network.get_input_embeddings().weight
        dense.get_input_embeddings().weight.copy_(rounded)  # tied: the head's as well
        reference = quantized(dense).network(IDS).logits
    assert torch.allclose(model.network(IDS).logits, reference, atol=1e-5)


def test_tied_layers_of_a_damaged_file(tmp_path: Path) -> None:
    save_artifact(quantized("llama-tied", embeddings="int8"), tmp_path)
    content = json.loads((tmp_path / "smelt.json").read_text())
    layer = "model.layers.0.self_attn.q_proj"
    for tied, message in (
        ([], "not a head and its embeddings"),
        ({"lm_head": layer}, "not a head and its embeddings"),
        ({"lm_head": None}, "not a head and its embeddings"),
        ({layer: "model.embed_tokens"}, "differ in format or shape"),
    ):
        (tmp_path / "smelt.json").write_text(json.dumps(content | {"tied": tied}))
        with pytest.raises(ModelError, match=message):
            load_artifact(tmp_path)


def test_embeddings_that_are_scaled(tmp_path: Path) -> None:
    """Gemma multiplies them by the square root of the hidden size."""
    ARCHITECTURES["gemma3_text"].save(tmp_path)
    model = load(tmp_path)
    ids = IDS[:1]
    with torch.no_grad():
        expected = model.network.get_input_embeddings()(ids)
        RoundToNearest(bits=8, group_size=-1, embeddings="int8").apply(model, MethodContext())
        actual = model.network.get_input_embeddings()(ids)
    assert (actual - expected).norm() < 0.01 * expected.norm() and float(expected.norm() / actual.norm()) > 0.99
    network = copy.deepcopy(model.network)
    engine = Engine(model, max_model_len=64)
    assert engine.runner.backend == "compiled-cpu"
    (answer,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    with torch.no_grad():
        logits = network(torch.tensor([[5, 6, 7, *answer.tokens]])).logits
    assert answer.tokens == logits[0, 2:-1].argmax(-1).tolist()


@pytest.mark.parametrize("name", ["bert", "llama-tied"])
def test_the_plan_counts_the_bytes_of_the_result(name: str) -> None:
    dense = Model(BUILDS[name]())
    method = RoundToNearest(bits=8, group_size=-1, symmetric=True, embeddings="int8")
    change = count_bytes(quantized(name, embeddings="int8").network) - count_bytes(dense.network)
    assert method.bytes_change(dense.anatomy) == change


def test_what_cannot_be_quantized_or_exported_is_refused() -> None:
    with pytest.raises(ModelError, match="no plain table of token embeddings"):
        RoundToNearest(bits=8, group_size=-1, embeddings="int8").check(Model(BUILDS["vit"]()).anatomy)
    with pytest.raises(RecipeError, match="int99"):
        RoundToNearest(embeddings="int99")
    with pytest.raises(FormatError, match="supports only Linear"):
        CompressedTensors().check(quantized(embeddings="int8"))
