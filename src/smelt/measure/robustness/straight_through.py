"""Gradients through a quantized network: dequantized weights, and rounding of activations passed straight through.

Without this, gradients vanish at every rounding and a quantized model looks robust because nothing attacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from smelt.models.quantized import QuantizedLinear, dequantized_weights


@contextmanager
def straight_through(network: nn.Module, *, weight_gradients: bool = False) -> Iterator[dict[str, Tensor]]:
    """Make quantized layers differentiable inside the context; yield their dequantized weights by path.

    With `weight_gradients` the weights collect gradients.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, QuantizedLinear)]
    rounding = [layer.round_inputs for layer in layers]
    dtype = next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)
    with dequantized_weights(network, dtype) as weights:
        try:
            for layer in layers:
                layer.round_inputs = _pass_through(_rounding(layer))
            for weight in weights.values():
                weight.requires_grad_(weight_gradients)
            yield weights
        finally:
            for layer, before in zip(layers, rounding, strict=True):
                layer.round_inputs = before


def _rounding(layer: QuantizedLinear) -> Callable[[Tensor], Tensor] | None:
    if layer.round_inputs is not None:
        return layer.round_inputs
    return None if layer.inputs is None else layer.inputs.fake_quantize


def _pass_through(function: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
    if function is None:
        return None
    rounded = function

    def apply(x: Tensor) -> Tensor:
        return x + (rounded(x) - x).detach()

    return apply
