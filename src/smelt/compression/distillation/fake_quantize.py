"""Layers that train as if they were quantized, and their conversion to packed layers.

`prepare` replaces layers of a network by fake-quantized ones, which keep the weights in float32; `convert` replaces
these by packed layers that compute the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from smelt.compression.distillation.quantizers import ActivationQuantizer, WeightQuantizer
from smelt.errors import DataError
from smelt.kernels.conv import ConvShape
from smelt.measure.logits import eval_mode
from smelt.models.batch_norm import batch_statistics
from smelt.models.quantization_scheme import QuantizationScheme
from smelt.models.quantized import QuantizedLinear
from smelt.models.quantized_network import linear_weight, quantized_replacement, replace_module


class FakeQuantizedLayer(nn.Module):
    """A Linear, Conv1D or convolution whose weight and inputs are rounded in every forward pass."""

    def __init__(
        self, layer: nn.Linear | Conv1D | nn.Conv1d | nn.Conv2d, path: str, weights: WeightQuantizer,
        inputs: ActivationQuantizer | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.layer, self.path, self.weights, self.inputs = layer, path, weights, inputs
        self.shape = ConvShape.of(layer) if isinstance(layer, nn.Conv1d | nn.Conv2d) else None
        self.weight_learned = nn.ParameterDict(weights.init(linear_weight(layer)))
        self.input_learned = nn.ParameterDict()
        self.inputs_enabled = inputs is not None
        self.other_input_bits: tuple[int, Tensor] | None = None  # other bits of the inputs, and whether they count: []

    @torch.no_grad()
    def init_inputs(self, x: Tensor) -> None:
        """Initialize what is learned about the inputs from those of a first batch."""
        assert self.inputs is not None
        self.inputs.check_input(x, self.path)
        for name, value in self.inputs.init(x.float()).items():
            self.input_learned[name] = nn.Parameter(value, requires_grad=self.inputs.trainable)

    def forward(self, x: Tensor) -> Tensor:
        if self.inputs is not None and self.inputs_enabled:
            x = self._fake_quantize_inputs(x.float()).to(x.dtype)
        weight = self.weights.fake_quantize(linear_weight(self.layer), dict(self.weight_learned.items())).to(x.dtype)
        if self.shape is None:
            return F.linear(x, weight, self.layer.bias)
        return self.shape.outputs(self.shape.convolve(self.shape.images(x), weight, self.layer.bias), x)

    def _fake_quantize_inputs(self, x: Tensor) -> Tensor:
        assert self.inputs is not None
        learned = dict(self.input_learned.items())
        rounded = self.inputs.fake_quantize(x, self.inputs.bits, learned)
        if self.other_input_bits is None:
            return rounded
        bits, is_chosen = self.other_input_bits
        return torch.where(is_chosen, self.inputs.fake_quantize(x, bits, learned), rounded)

    def penalty(self) -> Tensor | float:
        """Return the layer's own term of the loss."""
        return 0.0 if self.inputs is None else self.inputs.penalty(dict(self.input_learned.items()))

    def convert(self) -> QuantizedLinear:
        """Return the packed layer with the same outputs."""
        packed = quantized_replacement(self.layer, packed_scheme(self.weights, self.inputs))
        packed.set_tensors(
            self.weights.quantize(linear_weight(self.layer), dict(self.weight_learned.items())), self.layer.bias
        )
        if self.inputs is not None:
            learned = {name: value.detach().to(packed.codes.device) for name, value in self.input_learned.items()}
            bits = self.inputs.bits
            packed.set_static_inputs(self.inputs.scale(bits, learned), self.inputs.zero_point(bits, learned))
        return packed


def packed_scheme(weights: WeightQuantizer, inputs: ActivationQuantizer | None) -> QuantizationScheme:
    """Return the scheme of the packed layer that these quantizers lead to."""
    input_format = None if inputs is None else inputs.format(inputs.bits)
    return QuantizationScheme(weights.format, input_format, static=inputs is not None)


def prepare(
    network: nn.Module, paths: Mapping[str, WeightQuantizer], inputs: ActivationQuantizer | None
) -> list[FakeQuantizedLayer]:
    """Replace the layers at these paths by fake-quantized ones, in float32."""
    layers = []
    for path, weights in paths.items():
        module = network.get_submodule(path).float()
        layers.append(FakeQuantizedLayer(module, path, weights, inputs))
        replace_module(network, path, layers[-1])
    return layers


def init_activations(network: Any, batch: Mapping[str, Tensor]) -> None:
    """Initialize the activation quantizers of all layers in one pass, each from inputs that are not quantized yet.

    Batch norms use the statistics of this batch, as training will: the running ones are those of float weights, and
    quantizers that change the scale of a weight, such as DoReFa's, would let activations grow from layer to layer.
    """
    layers = [layer for layer in fake_quantized_layers(network).values() if layer.inputs is not None]
    handles = [
        layer.register_forward_pre_hook(lambda module, args: module.init_inputs(args[0].detach())) for layer in layers
    ]
    try:
        with float_inputs(network), eval_mode(network), batch_statistics(network):
            network(**batch)
    finally:
        for handle in handles:
            handle.remove()
    for layer in layers:
        assert layer.inputs is not None
        if not layer.input_learned and layer.inputs.init(torch.ones(1)):
            raise DataError(f"{layer.path} got no input in the first batch, so its activations cannot be quantized.")


def convert(network: nn.Module) -> dict[str, QuantizedLinear]:
    """Replace all fake-quantized layers by packed ones; return these by path."""
    packed = {}
    for path, layer in fake_quantized_layers(network).items():
        packed[path] = layer.convert()
        replace_module(network, path, packed[path])
    return packed


def fake_quantized_layers(network: nn.Module) -> dict[str, FakeQuantizedLayer]:
    return {path: module for path, module in network.named_modules() if isinstance(module, FakeQuantizedLayer)}


@contextmanager
def float_inputs(network: nn.Module) -> Iterator[None]:
    """Do not quantize activations inside the context."""
    layers = list(fake_quantized_layers(network).values())
    for layer in layers:
        layer.inputs_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.inputs_enabled = layer.inputs is not None


@contextmanager
def other_input_bits(network: nn.Module, bits: int, chosen: Tensor) -> Iterator[None]:
    """Quantize the inputs of the chosen layers, [layers], with other bits inside the context.

    The choice is a tensor, so that a CUDA graph can draw it anew in each replay.
    """
    layers = list(fake_quantized_layers(network).values())
    for layer, is_chosen in zip(layers, chosen, strict=True):
        layer.other_input_bits = bits, is_chosen
    try:
        yield
    finally:
        for layer in layers:
            layer.other_input_bits = None
