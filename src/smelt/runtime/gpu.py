"""The network on a GPU: the same function as the module's, with its small operations fused in Triton.

Everything it is given lies on the device and nothing is read back, so that a step can be captured in a graph. A single
token takes a shorter way, with norms, gates and additions inside the products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smelt.kernels.gpu.fused_ops import add_rms_norm, silu_and_mul
from smelt.kernels.gpu.rope import RotaryParams
from smelt.kernels.gpu.vector import fused_gemv
from smelt.runtime.decoder import Attention, Decoder, FeedForward, Norm, stacked

# Queries, keys and values of all heads [tokens, heads * width], not yet turned -> [tokens, heads * width]
Attend = Callable[[Tensor, Attention], Tensor]


class FusedNetwork:
    """Hidden states and logits from embedded tokens; what attention is comes from outside."""

    def __init__(self, network: Decoder, max_num_seqs: int) -> None:
        self.decoder = network
        heads = max(part.kv_heads for part in network.parts if isinstance(part, Attention))
        self.arrived = torch.zeros(max_num_seqs * heads, dtype=torch.int32, device=network.table.device)
        self._first = [
            _Product(part.writers if isinstance(part, Attention) else (part.gate, part.up)) for part in network.parts
        ]
        self._second = [_Product([part.output]) for part in network.parts]
        self._head = _Product([network.head])

    def hidden(self, hidden: Tensor, attend: Attend) -> Tensor:  # [tokens, width] -> the same
        """What the last layer gives, before the last norm; in place."""
        given: Tensor | None = None
        for part, first, second in zip(self.decoder.parts, self._first, self._second, strict=True):
            if isinstance(part, FeedForward):
                inner = first.gated(hidden, given, part.norm)
            else:
                inner = attend(first.normed(hidden, given, part.norm), part)
            given = second.added(inner, hidden)
        return hidden if given is None else add_rms_norm(hidden, given, None, 0.0)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head.normed(hidden, None, self.decoder.norm)

    def rotation(self, part: Attention) -> RotaryParams:
        norms, epsilon = None, 0.0
        if part.query_norm is not None and part.key_norm is not None:
            norms, epsilon = (part.query_norm.weight, part.key_norm.weight), part.query_norm.epsilon
        return RotaryParams(self.decoder.cosines, self.decoder.sines, norms, epsilon)


class _Product:
    """Layers with one input as one product, side by side, and what stands before and after it."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        whole = layers[0] if len(layers) == 1 else stacked(layers)
        self.layers = list(layers) if whole is None else [whole]
        self.plain = whole is not None and type(whole) is nn.Linear

    def normed(self, hidden: Tensor, given: Tensor | None, norm: Norm) -> Tensor:
        """Of the norm of hidden + given, a sum that takes hidden's place."""
        if self.plain and len(hidden) == 1:
            return self._one(_sum(hidden, given), norm=norm.weight, epsilon=norm.epsilon)
        return self(add_rms_norm(hidden, given, norm.weight, norm.epsilon))

    def gated(self, hidden: Tensor, given: Tensor | None, norm: Norm) -> Tensor:
        """The same; the first half of its rows gates the second."""
        if self.plain and len(hidden) == 1 and self.layers[0].bias is None:
            return self._one(_sum(hidden, given), norm=norm.weight, epsilon=norm.epsilon, gated=True)
        return silu_and_mul(self(add_rms_norm(hidden, given, norm.weight, norm.epsilon)))

    def added(self, x: Tensor, hidden: Tensor) -> Tensor | None:
        """What is still to be added to hidden; None where it has been."""
        if self.plain and len(x) == 1:
            self._one(x, added=hidden)
            return None
        return self(x)

    def __call__(self, x: Tensor) -> Tensor:
        found = [layer(x) for layer in self.layers]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _one(self, x: Tensor, **around: Any) -> Tensor:
        layer: Any = self.layers[0]
        return fused_gemv(x, layer.weight, layer.bias, **around)


def _sum(hidden: Tensor, given: Tensor | None) -> Tensor:
    return hidden if given is None else add_rms_norm(hidden, given, None, 0.0)
