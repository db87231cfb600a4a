"""A network that runs the integer graph of a decoder, with an int8 KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from smelt.errors import ModelError
from smelt.models.anatomy_builder import anatomy_of
from smelt.runtime.integer.decoders import POSITIONS, past_names, present_names
from smelt.runtime.integer.graph import IntegerGraph
from smelt.runtime.integer.network import IntegerNetwork


@dataclass
class IntegerDecoderOutput(ModelOutput):
    """The logits, dequantized to float32, and the KV cache with the tokens of this call."""

    logits: Tensor | None = None
    past_key_values: Cache | None = None


class IntegerDecoder(IntegerNetwork, GenerationMixin):
    """Runs an integer graph with a KV cache of transformers in int8."""

    program: ClassVar[str] = "integer-decoder"

    def __init__(self, graph: IntegerGraph, outline: PreTrainedModel) -> None:
        super().__init__(graph, outline)
        self.generation_config = outline.generation_config

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **_: Any,
    ) -> IntegerDecoderOutput:
        """Run tokens [batch, tokens] after the cached ones; the mask [batch, cached and new tokens] marks padding."""
        cache = DynamicCache(config=self.config) if past_key_values is None else past_key_values
        if not isinstance(cache, DynamicCache):
            raise ModelError("an integer-only decoder has an int8 KV cache of its own; leave out the KV cache format.")
        inputs = decoder_inputs(self.outline, input_ids, attention_mask, position_ids, cache)
        outputs = self.interpreter.run(inputs)
        for layer in range(self.config.num_hidden_layers):
            new = (outputs[name][:, :, -input_ids.shape[1] :] for name in present_names(layer))
            cache.update(*new, layer)
        logits = self.graph.dequantize("logits", outputs["logits"])
        return IntegerDecoderOutput(logits, cache if use_cache is not False else None)


def decoder_inputs(
    outline: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: Cache | None = None,
) -> dict[str, Tensor]:
    """Return all inputs of the graph: without a mask no token is padding, without a cache there are none before."""
    past = 0 if cache is None else int(cache.get_seq_length())
    batch, tokens = input_ids.shape
    if past + tokens > outline.config.max_position_embeddings:
        raise ModelError(
            f"a text of {past + tokens:,} tokens is longer than the {outline.config.max_position_embeddings:,} "
            "positions of this integer graph; shorten it."
        )
    if attention_mask is None:
        attention_mask = input_ids.new_ones(batch, past + tokens)
    if position_ids is None:
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, POSITIONS: position_ids.expand(batch, -1)}
    for block in anatomy_of(outline).blocks:
        heads = block.parts[0]
        empty = torch.zeros(batch, heads.units, 0, heads.head_dim, dtype=torch.int8, device=input_ids.device)
        inputs |= dict.fromkeys(past_names(block.index), empty)
        if past and cache is not None:
            layer: Any = cache.layers[block.index]
            inputs |= dict(zip(past_names(block.index), (layer.keys, layer.values), strict=True))
    return inputs
