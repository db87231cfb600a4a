"""A GGUF file as a network whose layers hold the file's own bits."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from smelt.errors import ModelError
from smelt.models.artifact import parameters_on_meta
from smelt.models.gguf import GgufFile, gguf_packed, gguf_shapes, gguf_tensors
from smelt.models.network import empty_network, matching_network
from smelt.models.quantized import QuantizationScheme, QuantizedLinear, replace_module


def packed_network(file: GgufFile, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """In eval mode. What the file holds in floats is dense, in `dtype`; so is the table of embeddings. A head that
    shares the table's weights becomes a layer of its own, and the configuration says so."""
    where = str(file.path)
    matching_network(config, gguf_shapes(file), where)  # before anything real is allocated
    packed = gguf_packed(file, config)
    config.tie_word_embeddings = config.tie_word_embeddings and "lm_head" not in packed
    with parameters_on_meta():
        network = empty_network(config, where, "cpu")
    tensors = gguf_tensors(file, config, leave_out={f"{path}.weight" for path in packed})
    state = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    for path in list(packed):
        bias = state.pop(f"{path}.bias", None)
        quantized = packed.pop(path)  # not held twice
        layer = QuantizedLinear.from_quantized(quantized, QuantizationScheme(quantized.format), bias=bias, dtype=dtype)
        replace_module(network, path, layer)
    network.load_state_dict(state, strict=False, assign=True)
    network.tie_weights()
    missing = sorted(name for name, parameter in network.named_parameters() if parameter.is_meta)
    if missing:
        raise ModelError(f"{where}: {missing[0]} is missing from the weights; Smelt does not make up weights.")
    network.config.dtype = dtype
    return network.eval()
