"""Quantized layers of a network: replace layers by them, and dequantize those that have no kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from smelt.errors import ModelError
from smelt.kernels.conv import ConvShape
from smelt.kernels.dispatch import forced_backend
from smelt.kernels.linear import ActivationQuant, select_kernel
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import DEQUANTIZED, QuantizedConv, QuantizedEmbedding, QuantizedLinear, quantized_layers
from smelt.numerics.format import Format

_QUANTIZABLE = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Embedding)


def linear_weight(module: nn.Module) -> Tensor:
    """Return the weight of a Linear or Conv1D as [out, in], a view; that of a convolution as the matrix that unfolded
    images are multiplied with, a copy."""
    weight: Any = module.weight
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return ConvShape.of(module).to_matrix(weight)
    return weight.T if isinstance(module, Conv1D) else weight


def module_weight(module: nn.Module, matrix: Tensor) -> Tensor:
    """Invert `linear_weight`: return a matrix as the weight of this module."""
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return ConvShape.of(module).to_weight(matrix).reshape(module.weight.shape)
    return matrix.T if isinstance(module, Conv1D) else matrix


def conv_shape(module: nn.Module) -> ConvShape | None:
    """Return the shape of a convolution, quantized or not; None of any other module."""
    if isinstance(module, QuantizedConv):
        return module.shape
    return ConvShape.of(module) if isinstance(module, nn.Conv1d | nn.Conv2d) else None


def quantized_replacement(module: Any, scheme: QuantizationScheme) -> QuantizedLinear:
    """Return the quantized layer that replaces a Linear, Conv1D, convolution or embedding, without tensors."""
    if isinstance(module, nn.Embedding):
        # A buffer in some families, which has no value while the network is on the meta device.
        scale = getattr(module, "scalar_embed_scale", None) or getattr(module, "embed_scale", None) or 1.0
        return QuantizedEmbedding(
            module.num_embeddings, module.embedding_dim, scheme, module.weight.dtype, float(scale)
        )
    bias, dtype = module.bias is not None, module.weight.dtype
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        return QuantizedConv(ConvShape.of(module), scheme, bias=bias, dtype=dtype)
    rows, columns = linear_weight(module).shape
    return QuantizedLinear(columns, rows, scheme, bias=bias, dtype=dtype)


def replace_module(network: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at a path, keeping the attributes that surgery recorded (kept units, added bias)."""
    parent, _, name = path.rpartition(".")
    for note, value in vars(network.get_submodule(path)).items():
        if note.startswith("smelt_"):
            setattr(new, note, value)
    setattr(network.get_submodule(parent), name, new)


def prepare_quantized_layers(network: nn.Module, schemes: Any, where: str) -> None:
    """Replace the named layers of a freshly built network by quantized ones without tensors."""
    if not isinstance(schemes, dict):
        raise ModelError(f"{where}: the list of quantized layers is invalid.")
    plain = {path: module for path, module in network.named_modules() if isinstance(module, _QUANTIZABLE)}
    for path, description in schemes.items():
        if path not in plain:
            raise ModelError(f"{where}: {path} is not a linear layer, convolution or embedding of this network.")
        scheme = QuantizationScheme.from_json(description, where)
        replace_module(network, path, quantized_replacement(plain[path], scheme))


def tie_layers(network: nn.Module, tied: Mapping[str, str]) -> None:
    """Let each named layer use the tensors of another one: a quantized LM head those of the quantized embeddings."""
    for path, source in tied.items():
        layer = network.get_submodule(path)
        for name, tensor in network.get_submodule(source).named_buffers():
            setattr(layer, name, tensor)


def tied_layers(network: nn.Module) -> dict[str, str]:
    """Return the quantized layers that use the tensors of quantized embeddings, with the path of those."""
    layers = quantized_layers(network)
    tables = {id(layer.codes): path for path, layer in layers.items() if isinstance(layer, QuantizedEmbedding)}
    return {
        path: tables[id(layer.codes)]
        for path, layer in layers.items()
        if not isinstance(layer, QuantizedEmbedding) and not layer.moved and id(layer.codes) in tables
    }


def quantize_lm_head(network: Any, weight: Format) -> None:
    """Replace the LM head by a quantized one, rounded to nearest; a tied table of embeddings stays as it is."""
    head = network.get_output_embeddings()
    if isinstance(head, QuantizedLinear):
        return
    if type(head) is not nn.Linear:
        raise ModelError("this network has no linear LM head that could be quantized.")
    quantized = weight.quantize(head.weight.detach().float())
    bias = None if head.bias is None else head.bias.detach()
    layer = QuantizedLinear.from_quantized(quantized, QuantizationScheme(weight), bias=bias, dtype=head.weight.dtype)
    network.set_output_embeddings(layer.to(head.weight.device))


def quantize_activations(network: nn.Module, inputs: Format) -> int:
    """Quantize the inputs of weight-only layers, scaled per token, where a kernel multiplies integers.

    Return how many layers changed; layers whose inputs have a format keep it.
    """
    changed = 0
    for layer in quantized_layers(network).values():
        if layer.scheme.inputs is None and not isinstance(layer, QuantizedEmbedding):
            dtype = getattr(network, "dtype", torch.float32)
            if select_kernel(layer.packed, ActivationQuant(inputs), dtype).quantizes_inputs:
                layer.quantize_inputs(inputs)
                changed += 1
    return changed


def lacks_kernel(layer: QuantizedLinear, dtype: torch.dtype) -> bool:
    """Return whether every forward would dequantize the weights first. False while a backend is forced."""
    if forced_backend() or layer.moved or isinstance(layer, QuantizedConv | QuantizedEmbedding):
        return False
    return select_kernel(layer.packed, layer.inputs, dtype).dequantizes(layer.packed)


def dequantize_without_kernel(network: nn.Module, dtype: torch.dtype) -> list[QuantizedLinear]:
    """Dequantize the weights of layers that have no kernel here, once, instead of at every forward; return the layers.

    The packed weights are freed. Nothing happens while a backend is forced.
    """
    plain = [layer for layer in quantized_layers(network).values() if lacks_kernel(layer, dtype)]
    for layer in plain:
        layer.set_dequantized_weight(layer.weight.to(dtype))
    return plain


def merge_dequantized(layers: Sequence[nn.Module]) -> nn.Linear | None:
    """Merge layers that were dequantized, with the same inputs, into a plain one; they become views of it, so that no
    memory is added. None if they do anything else than to multiply by their weights."""
    quantized = [layer for layer in layers if isinstance(layer, QuantizedLinear) and layer.backend == DEQUANTIZED]
    extras = any(layer.bias is not None or layer.round_inputs is not None for layer in quantized)
    if len(quantized) < len(layers) or extras:
        return None
    schemes = [layer.scheme for layer in quantized]
    if any(scheme.rank or scheme.hadamard or scheme.inputs is not None for scheme in schemes):
        return None
    weight = torch.cat([layer.dequantized_weight for layer in quantized])
    for layer, view in zip(quantized, weight.split([layer.out_features for layer in quantized]), strict=True):
        layer.set_dequantized_weight(view)
    merged = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    return merged
