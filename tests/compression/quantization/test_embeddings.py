"""Quantized token embeddings: lookups, storage, what refuses them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from smelt.compression.base import MethodContext
from smelt.compression.quantization.rtn import RoundToNearest
from smelt.errors import FormatError, ModelError, RecipeError
from smelt.export.compressed_tensors import CompressedTensors
from smelt.measure.cost import count_bytes, count_parameters
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedEmbedding, quantized_layers
from smelt.models.quantized_network import quantized_replacement
from smelt.numerics import get_format
from tests.tiny import BUILDS

IDS = torch.tensor([[5, 2, 9, 2], [0, 98, 7, 5]])


def quantized(**settings: object) -> Model:
    model = Model(BUILDS["bert"]())
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


def test_the_plan_counts_the_bytes_of_the_result() -> None:
    dense = Model(BUILDS["bert"]())
    method = RoundToNearest(bits=8, group_size=-1, symmetric=True, embeddings="int8")
    change = count_bytes(quantized(embeddings="int8").network) - count_bytes(dense.network)
    assert method.bytes_change(dense.anatomy) == change


def test_what_cannot_be_quantized_or_exported_is_refused() -> None:
    with pytest.raises(ModelError, match="shares the table of token embeddings"):
        RoundToNearest(bits=8, group_size=-1, embeddings="int8").check(Model(BUILDS["llama-tied"]()).anatomy)
    with pytest.raises(ModelError, match="no plain table of token embeddings"):
        RoundToNearest(bits=8, group_size=-1, embeddings="int8").check(Model(BUILDS["vit"]()).anatomy)
    with pytest.raises(RecipeError, match="int99"):
        RoundToNearest(embeddings="int99")
    with pytest.raises(FormatError, match="supports only Linear"):
        CompressedTensors().check(quantized(embeddings="int8"))
