"""InfiniPot on a network: what the catalyst prompt looks at, what stays of a layer, and its keys as they stand then.
A stream's pot and the pages of a server are both cooked down by it."""

from __future__ import annotations

import torch
from torch import Tensor

from smelt.kvcache.eviction.observe import check
from smelt.kvcache.streaming.catalyst_prompt import attention_of, pooled
from smelt.kvcache.streaming.infinipot import InfiniPot
from smelt.kvcache.streaming.rotary import renumbering
from smelt.kvcache.streaming.text_io import Words
from smelt.models.model import Model


class Distiller:
    """Refuses networks that cannot be cooked down."""

    def __init__(self, model: Model, rule: InfiniPot) -> None:
        check(model)
        self.rule = rule
        self._renumbered = renumbering(model.network)
        self.prompt = Words(model.network, model.tokenizer).tokens(rule.prompt)  # [prompt]
        width = next(part.head_dim for part in model.anatomy.parts if part.kind == "heads")
        self._turned(torch.zeros(1, 1, width, device=model.device), self.prompt.new_zeros(1, 1))  # refused here if ever

    def attention(self, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
        """Of the prompt's queries [1, heads, prompt, width] on the tokens before them, from the keys of these and of
        the prompt [1, kv_heads, tokens + prompt, width]: [kv_heads, tokens]"""
        return pooled(attention_of(queries, keys, scale), self.rule.kernel)

    def places(self, attention: Tensor, numbers: Tensor, novel: Tensor, count: int) -> Tensor:
        """What stays of a layer, [kv_heads, count], rising; see the rule."""
        return self.rule.places(attention, numbers.contiguous(), novel, count)

    def turned(self, keys: Tensor, places: Tensor) -> Tensor:
        """Keys [kv_heads, kept, width] that lay at these places [kv_heads, kept], now at 0, 1, ..."""
        return self._turned(keys, places) if self.rule.renumber else keys

    def _turned(self, keys: Tensor, places: Tensor) -> Tensor:
        return self._renumbered(keys, places, torch.arange(places.shape[1], device=places.device).expand_as(places))
