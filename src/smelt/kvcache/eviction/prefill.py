"""Run prefill once and record the attention inputs of every layer; decode from there with per-head eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from smelt.errors import ModelError
from smelt.kvcache.eviction.attention import has_full_attention, masked_attention, softmax_scale
from smelt.kvcache.eviction.profile import KVShape
from smelt.kvcache.eviction.scorer import AttentionInputs
from smelt.kvcache.rope import rope_functions
from smelt.models.carved_experts import refuse_carved_experts
from smelt.models.model import Model


@dataclass(frozen=True)
class RecordedPrefill:
    """Attention inputs and final logits of a prompt."""

    layers: list[AttentionInputs]
    logits: Tensor  # [batch, vocab]: after the last token
    config: PreTrainedConfig

    @property
    def seq_len(self) -> int:
        return self.layers[0].seq_len

    def cache(self, repeats: int = 1) -> DynamicCache:
        """Return the KV cache of the prompt, optionally repeated along the batch."""
        cache = DynamicCache(config=self.config)
        for layer, inputs in enumerate(self.layers):
            shape = (repeats * len(inputs.keys), *(-1 for _ in inputs.keys.shape[1:]))
            cache.update(inputs.keys.expand(shape), inputs.values.expand(shape), layer)
        return cache


@torch.no_grad()
def record_prefill(model: Model, ids: Tensor) -> RecordedPrefill:  # [batch, tokens]
    """Prefill a batch of prompts of equal length."""
    network: Any = model.network
    check_evictable(model)
    recorded: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def hook(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        recorded[layer] = (queries, keys, values)

    cache = DynamicCache(config=network.config)
    with masked_attention(network, hook=hook):
        logits = network(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    rotate, unrotate = rope_functions(network, ids.device)
    layers = []
    for part in [part for part in model.anatomy.parts if part.kind == "heads"]:
        queries, keys, values = recorded[part.block]
        scale = softmax_scale(part.owner, queries.shape[-1])
        layers.append(AttentionInputs(keys, values, unrotate(queries, 0), rotate, scale))
    return RecordedPrefill(layers, logits, network.config)


def check_evictable(model: Model) -> None:
    """Refuse models whose KV cache cannot be compressed."""
    parts = [part for part in model.anatomy.parts if part.kind == "heads"]
    if model.task != "language" or not model.anatomy.family.causal:
        raise ModelError("only causal language models have a KV cache to compress.")
    refuse_carved_experts(model.network, "the router that chooses them keeps every token; leave its KV cache complete")
    if not has_full_attention(model.network.config):
        raise ModelError(
            "this model has sliding-window layers, which keep only the last tokens already; it cannot be compressed."
        )
    if len({part.units for part in parts}) > 1 or not all(part.units for part in parts):
        raise ModelError("layers of this model have different numbers of KV heads, which budgets do not support yet.")


def find_kv_shape(model: Model) -> KVShape:
    """Return the dimensions by which a profile identifies its model."""
    parts = [part for part in model.anatomy.parts if part.kind == "heads"]
    return KVShape(model.network.config.model_type, len(parts), parts[0].units, parts[0].head_dim)


@torch.no_grad()
def decode_logits(model: Model, prefill: RecordedPrefill, retained: Tensor | None, ids: Tensor) -> Tensor:
    """Compute the logits [batch, new, vocab] of more tokens [batch, new] over the retained tokens of the prompt.

    One prompt can be continued under many masks at once: the batch is that of `retained`."""
    network: Any = model.network
    repeats = 1 if retained is None else retained.shape[1] // len(prefill.logits)
    with masked_attention(network, retained):
        output = network(ids.expand(repeats * len(ids), -1), past_key_values=prefill.cache(repeats))
    logits: Tensor = output.logits
    return logits
