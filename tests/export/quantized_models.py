"""Small networks with packed layers, quantized by RTN, for export tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers import PreTrainedModel

from smelt.models.model import Model
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.models.quantized_network import replace_module
from smelt.numerics.catalog import get_format
from smelt.numerics.format import PER_TENSOR

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 99,
    "max_position_embeddings": 128,
}
CAUSAL: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}


def network(kind: str = "Llama", dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Build a decoder of a family, with biases and norms away from 0 and 1."""
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(**{**CAUSAL, **changes})
    return _perturb(hf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), 0.05)


def encoder(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = hf.BertConfig(**{**SIZES, "num_labels": 3, **changes})
    return _perturb(hf.BertForSequenceClassification(config).eval(), 0.2)


@torch.no_grad()
def _perturb(network: PreTrainedModel, size: float) -> PreTrainedModel:
    for parameter in network.parameters():
        parameter.add_(size * torch.randn_like(parameter))
    return network


def scheme(weight: str, inputs: str | None = None, *, static: bool = False, **more: Any) -> QuantizationScheme:
    rounded = None if inputs is None else get_format(inputs)
    if rounded is not None and static:
        rounded = replace(rounded, group_size=PER_TENSOR)
    return QuantizationScheme(get_format(weight), rounded, static, **more)


def quantized(
    network: PreTrainedModel,
    chosen: QuantizationScheme | Callable[[str], QuantizationScheme | None],
    source: str = "a model",
) -> Model:
    """Replace every linear layer of the blocks by a packed one, with one scheme or a scheme per path."""
    for path, module in list(network.named_modules()):
        inside = "layers." in path or "layer." in path
        own = chosen if isinstance(chosen, QuantizationScheme) else chosen(path)
        if isinstance(module, nn.Linear) and inside and own is not None:
            matrix = own.weight.quantize(module.weight.detach())
            layer = QuantizedLinear.from_quantized(matrix, own, bias=module.bias, dtype=module.weight.dtype)
            if own.has_static_zero_point:
                layer.set_static_inputs(torch.tensor(4 / 255), torch.tensor(64))
            elif own.static:
                layer.set_static_input_scale(torch.full((module.in_features,), 3.0))
            replace_module(network, path, layer)
    return Model(network, None, source)


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(99, (batch, length), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def logits(network: nn.Module, ids: torch.Tensor | None = None) -> torch.Tensor:
    result: torch.Tensor = network(tokens() if ids is None else ids)[0]
    return result.float()
