"""Reads a prompt once and keeps what attention saw of it in every layer; goes on from there as each head kept it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from smelt.errors import ModelError
from smelt.kvcache.eviction.attention import attending
from smelt.kvcache.eviction.profile import KVShape
from smelt.kvcache.eviction.scorer import AttentionInputs
from smelt.kvcache.rope import rope_functions
from smelt.models.model import Model


@dataclass(frozen=True)
class RecordedPrefill:
    """A prompt that was read."""

    layers: list[AttentionInputs]  # of each layer
    logits: Tensor  # [batch, vocabulary]: after its last token
    config: PreTrainedConfig

    @property
    def seq_len(self) -> int:
        return self.layers[0].seq_len

    def cache(self, times: int = 1) -> DynamicCache:
        """What the network goes on from; of one prompt also several times beside itself."""
        found = DynamicCache(config=self.config)
        for layer, seen in enumerate(self.layers):
            shape = (times * len(seen.keys), *(-1 for _ in seen.keys.shape[1:]))
            found.update(seen.keys.expand(shape), seen.values.expand(shape), layer)
        return found


@torch.no_grad()
def record_prefill(model: Model, ids: Tensor) -> RecordedPrefill:  # [batch, tokens]
    """All prompts of a batch have the same length."""
    network: Any = model.network
    check_evictable(model)
    caught: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def listen(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        caught[layer] = (queries, keys, values)

    cache = DynamicCache(config=network.config)
    with attending(network, listen=listen):
        logits = network(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    turn, back = rope_functions(network, ids.device)
    parts = [part for part in model.anatomy.parts if part.kind == "heads"]
    seen = []
    for part in parts:
        queries, keys, values = caught[part.block]
        holder: Any = part.owner
        scale = float(getattr(holder, "scaling", None) or queries.shape[-1] ** -0.5)
        seen.append(AttentionInputs(keys, values, back(queries, 0), turn, scale))
    return RecordedPrefill(seen, logits, network.config)


def check_evictable(model: Model) -> None:
    """What cannot be compressed is refused."""
    parts = [part for part in model.anatomy.parts if part.kind == "heads"]
    if model.task != "language" or not model.anatomy.family.causal:
        raise ModelError("only language models keep keys and values of what they read.")
    kinds = set(getattr(model.network.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(model.network.config, "sliding_window", None):
        raise ModelError("this model has sliding layers, which keep the last tokens already; it cannot be compressed.")
    if len({part.units for part in parts}) > 1 or not all(part.units for part in parts):
        raise ModelError("layers of this model have different numbers of heads, which budgets do not know yet.")


def kv_shape_of(model: Model) -> KVShape:
    """By which a profile knows its model again."""
    parts = [part for part in model.anatomy.parts if part.kind == "heads"]
    return KVShape(model.network.config.model_type, len(parts), parts[0].units, parts[0].head_dim)


@torch.no_grad()
def decode_logits(model: Model, reading: RecordedPrefill, kept: Tensor | None, ids: Tensor) -> Tensor:
    """Of more tokens [batch, new] -> [batch, new, vocabulary], where each head sees what it kept of the prompt. One
    prompt can be gone on from in many ways at once: the batch is that of `kept`."""
    network: Any = model.network
    times = 1 if kept is None else kept.shape[1] // len(reading.logits)
    with attending(network, kept):
        found: Tensor = network(ids.expand(times * len(ids), -1), past_key_values=reading.cache(times)).logits
    return found
