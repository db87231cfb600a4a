"""The module of an attention layer that multiplies its values with the attention map of an earlier layer.

Eager attention has the map as a tensor. Any other attention function may hold a function instead that applies the map
without computing it as a tensor, which is what paged attention does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from smelt.errors import ModelError

# (layer, its values [batch, KV heads, tokens, head_dim]) -> contexts [batch, tokens, heads, head_dim]
ApplyMap = Callable[[int, Tensor], Tensor]


class AttentionMapSlot:
    """Holds the map [batch, heads, queries, keys] of one layer until the last layer that uses it has run."""

    def __init__(self) -> None:
        self.readers = 0
        self._map: Tensor | ApplyMap | None = None
        self._remaining = 0
        self._is_held = False  # by the attention function of the layer that is running

    @classmethod
    def attach(cls, owner: Any) -> AttentionMapSlot:
        """Return the slot that an attention module fills whenever it runs."""
        slot = cls()
        owner.smelt_map_slot = slot
        owner.register_forward_hook(slot.store)
        return slot

    def hold(self, apply: ApplyMap) -> None:
        """Keep a function that applies the map, for an attention function that does not return it."""
        self._map, self._is_held = apply, True

    def store(self, module: nn.Module, args: Any, output: Any) -> None:
        """Keep the map that eager attention returns beside its output (a forward hook)."""
        attention_map = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if attention_map is not None:
            self._map = attention_map
        elif not self._is_held:
            raise ModelError(
                "this model's layers use the attention map of another layer, which only eager attention computes; set "
                "the attention implementation to eager."
            )
        self._remaining, self._is_held = self.readers, False

    def take(self) -> Tensor | ApplyMap:
        if self._map is None:
            raise ModelError(
                "a layer that uses another layer's attention map ran before that layer; run the whole network."
            )
        found, self._remaining = self._map, self._remaining - 1
        if self._remaining <= 0:
            self._map = None
        return found


class ReusedAttention(nn.Module):
    """Attention with the map of another layer: V, the output projection if it is inside, and neither Q nor K."""

    def __init__(
        self, value_name: str, value: nn.Module, output_name: str | None, output: nn.Module | None,
        slot: AttentionMapSlot, *, leader: int, head_dim: int, layer_idx: int | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.value_name, self.output_name = value_name, output_name
        self.slot, self.leader, self.width, self.layer_idx = slot, leader, head_dim, layer_idx
        self.add_module(value_name, value)
        if output_name is not None:
            self.add_module(output_name, output)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        attention_map = self.slot.take()
        values = self.get_submodule(self.value_name)(hidden_states)
        values = values.unflatten(-1, (-1, self.width)).transpose(1, 2)  # [batch, KV heads, tokens, head_dim]
        if not isinstance(attention_map, Tensor):
            assert self.layer_idx is not None
            return self._project(attention_map(self.layer_idx, values)), None
        cache = kwargs.get("past_key_values")
        if cache is not None:
            no_keys = values[..., :0]  # as many tokens, no bytes: generation reads the length from the keys
            _, values = cache.update(no_keys, values, self.layer_idx)
        values = values.repeat_interleave(attention_map.shape[1] // values.shape[1], dim=1)
        return self._project((attention_map @ values).transpose(1, 2)), attention_map

    def _project(self, contexts: Tensor) -> Tensor:
        contexts = contexts.flatten(2)
        return contexts if self.output_name is None else self.get_submodule(self.output_name)(contexts)
