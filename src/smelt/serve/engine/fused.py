"""The network on a GPU: the same function as the module's, with its small operations fused in Triton.

Everything it is given lies on the device and nothing is read back, so that a step can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from smelt.kernels.gpu.decoder import add_norm, gate, rotate_write
from smelt.serve.engine.attention import PagedCache
from smelt.serve.engine.decoder import Attention, Decoder, FeedForward, stacked

Attend = Callable[[Tensor, Tensor, Tensor, Attention], Tensor]  # queries [tokens, heads, width], pages of keys, values


class FusedNetwork:
    """Hidden states and logits from tokens; what attention is comes from outside."""

    def __init__(self, network: Decoder, cache: PagedCache) -> None:
        self.decoder, self.cache = network, cache
        self._together = [
            _Together(part.writers if isinstance(part, Attention) else (part.gate, part.up)) for part in network.parts
        ]

    def hidden(self, ids: Tensor, positions: Tensor, places: Tensor, attend: Attend) -> Tensor:  # [tokens, width]
        """What the last layer gives, before the last norm."""
        hidden = F.embedding(ids, self.decoder.table)
        given: Tensor | None = None
        for part, together in zip(self.decoder.parts, self._together, strict=True):
            both = together(add_norm(hidden, given, part.norm.weight, part.norm.epsilon))
            if isinstance(part, FeedForward):
                given = part.output(gate(both))
            else:
                given = part.output(self._attention(part, both, positions, places, attend))
        return add_norm(hidden, given, None, 0.0)

    def logits(self, hidden: Tensor) -> Tensor:
        norm = self.decoder.norm
        found: Tensor = self.decoder.head(add_norm(hidden, None, norm.weight, norm.epsilon))
        return found

    def _attention(
        self, part: Attention, both: Tensor, positions: Tensor, places: Tensor, attend: Attend
    ) -> Tensor:  # [tokens, heads * width]
        keys, values = self.cache.keys[part.index], self.cache.values[part.index]
        norms = None
        if part.query_norm is not None and part.key_norm is not None:
            norms = part.query_norm.weight, part.key_norm.weight
        epsilon = 0.0 if part.query_norm is None else part.query_norm.epsilon
        rotate_write(
            both, positions, places, self.decoder.cosines, self.decoder.sines, keys, values, part.heads, norms, epsilon
        )
        queries = both[:, : part.heads * part.width].unflatten(1, (part.heads, part.width))
        return attend(queries, keys, values, part).flatten(1)


class _Together:
    """Layers with one input as one product, side by side."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        whole = stacked(layers)
        self.layers = list(layers) if whole is None else [whole]

    def __call__(self, x: Tensor) -> Tensor:
        found = [layer(x) for layer in self.layers]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)
