"""A trained sentence classifier with its rows, dense and quantized."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from transformers import PreTrainedModel

from smelt.data import LabeledData
from smelt.data.labeled import labeled_from_rows
from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.models.quantized_network import linear_weight, replace_module
from smelt.numerics.catalog import get_format
from tests.character_tokenizer import character_tokenizer
from tests.trained import labeled_rows, trained_bert

ROWS = labeled_rows(80)


@lru_cache(maxsize=1)
def _network() -> PreTrainedModel:
    return trained_bert(ROWS)


def rows() -> LabeledData:
    return labeled_from_rows(ROWS, "rows")


def classifier(number_format: str | None = None, inputs: str | None = None) -> Model:
    """Return a copy of the classifier; with a format, all linear layers are quantized."""
    model = Model(copy.deepcopy(_network()), character_tokenizer(encoder=True), number_format or "dense")
    if number_format is not None:
        quantize(model, number_format, inputs)
    return model


@torch.no_grad()
def quantize(model: Model, number_format: str, inputs: str | None = None) -> None:
    scheme = QuantizationScheme(get_format(number_format), None if inputs is None else get_format(inputs))
    for path, layer in list(model.network.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            quantized = scheme.weight.quantize(linear_weight(layer))
            new = QuantizedLinear.from_quantized(quantized, scheme, bias=layer.bias, dtype=torch.float32)
            replace_module(model.network, path, new)
