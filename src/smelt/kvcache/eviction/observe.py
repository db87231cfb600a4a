"""Reads a prompt once and keeps what attention saw of it in every layer; goes on from there as each head kept it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from smelt.errors import ModelError
from smelt.kvcache.eviction.attention import attending
from smelt.kvcache.eviction.attention_inputs import Seen, Turn
from smelt.kvcache.eviction.profile import Shape
from smelt.models.model import Model


@dataclass(frozen=True)
class Reading:
    """A prompt that was read."""

    seen: list[Seen]  # of each layer
    logits: Tensor  # [batch, vocabulary]: after its last token
    config: PreTrainedConfig

    @property
    def tokens(self) -> int:
        return self.seen[0].tokens

    def cache(self, times: int = 1) -> DynamicCache:
        """What the network goes on from; of one prompt also several times beside itself."""
        found = DynamicCache(config=self.config)
        for layer, seen in enumerate(self.seen):
            shape = (times * len(seen.keys), *(-1 for _ in seen.keys.shape[1:]))
            found.update(seen.keys.expand(shape), seen.values.expand(shape), layer)
        return found


@torch.no_grad()
def read(model: Model, ids: Tensor) -> Reading:  # [batch, tokens]
    """All prompts of a batch have the same length."""
    network: Any = model.network
    check(model)
    caught: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def listen(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        caught[layer] = (queries, keys, values)

    cache = DynamicCache(config=network.config)
    with attending(network, listen=listen):
        logits = network(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    turn, back = rotation_of(network, ids.device)
    parts = [part for part in model.anatomy.parts if part.kind == "heads"]
    seen = []
    for part in parts:
        queries, keys, values = caught[part.block]
        holder: Any = part.holder
        scale = float(getattr(holder, "scaling", None) or queries.shape[-1] ** -0.5)
        seen.append(Seen(keys, values, back(queries, 0), turn, scale))
    return Reading(seen, logits, network.config)


def check(model: Model) -> None:
    """What cannot be compressed is refused."""
    parts = [part for part in model.anatomy.parts if part.kind == "heads"]
    if model.task != "language" or not model.anatomy.family.causal:
        raise ModelError("only language models keep keys and values of what they read.")
    kinds = set(getattr(model.network.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(model.network.config, "sliding_window", None):
        raise ModelError("this model has sliding layers, which keep the last tokens already; it cannot be compressed.")
    if len({part.units for part in parts}) > 1 or not all(part.units for part in parts):
        raise ModelError("layers of this model have different numbers of heads, which budgets do not know yet.")


def shape_of(model: Model) -> Shape:
    """By which a profile knows its model again."""
    parts = [part for part in model.anatomy.parts if part.kind == "heads"]
    return Shape(model.network.config.model_type, len(parts), parts[0].units, parts[0].head_dim)


def rotation_of(network: PreTrainedModel, device: torch.device) -> tuple[Turn, Turn]:
    """By the angle of positions, and back. Networks without rotary positions turn nothing."""
    rotary: Any = getattr(network.base_model, "rotary_emb", None)
    if rotary is None:
        return (lambda x, _: x), (lambda x, _: x)

    def angles(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, first + x.shape[-2], device=device)[None]
        cosines, sines = rotary(x.float(), positions)
        return cosines[0].float(), sines[0].float()  # [tokens, width]

    def turn(x: Tensor, first: int) -> Tensor:
        cosines, sines = angles(x, first)
        return (x.float() * cosines + _halves_exchanged(x.float()) * sines).to(x.dtype)

    def back(x: Tensor, first: int) -> Tensor:
        cosines, sines = angles(x, first)
        length = cosines.square() + sines.square()  # one, but for models that scale their rotation
        return ((x.float() * cosines - _halves_exchanged(x.float()) * sines) / length).to(x.dtype)

    return turn, back


def _halves_exchanged(x: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


@torch.no_grad()
def logits_after(model: Model, reading: Reading, kept: Tensor | None, ids: Tensor) -> Tensor:
    """Of more tokens [batch, new] -> [batch, new, vocabulary], where each head sees what it kept of the prompt. One
    prompt can be gone on from in many ways at once: the batch is that of `kept`."""
    network: Any = model.network
    times = 1 if kept is None else kept.shape[1] // len(reading.logits)
    with attending(network, kept):
        found: Tensor = network(ids.expand(times * len(ids), -1), past_key_values=reading.cache(times)).logits
    return found
