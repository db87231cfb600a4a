"""A small causal network that chooses an expert for every token from the token ids alone, ahead of all layers.

It has an embedding table of its own, a few pre-norm blocks of attention and a feed-forward, and a linear layer with one
output per expert. Attention sees a window of the last tokens, so the expert of a token depends on a bounded number of
ids: it can be computed for a queued prompt before anything else runs, and for a new token without a cache. In
generation with a cache, its keys and values are further layers of that cache. It computes in float32 whatever its
weights are stored in, so that the two agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer

from smelt.errors import ModelError

HEAD_DIM = 32
_QUERIES = 512  # whose attention is computed at once: the scores then take this times (this + window) values
_THETA = 10_000.0
_EPSILON = 1e-6


@dataclass(frozen=True)
class RouterConfig:
    """The sizes of a router."""

    vocab_size: int
    experts: int
    width: int
    layers: int = 1
    window: int = 128  # tokens that attention sees, the token itself included

    @property
    def heads(self) -> int:
        return next(heads for heads in range(max(self.width // HEAD_DIM, 1), 0, -1) if self.width % heads == 0)

    @property
    def context(self) -> int:
        """How many of the last ids the expert of a token depends on."""
        return self.layers * (self.window - 1) + 1

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any, where: str) -> RouterConfig:
        """Read the sizes from an untrusted file."""
        names = set(cls.__dataclass_fields__)
        numbers = isinstance(values, Mapping) and set(values) == names and all(type(v) is int for v in values.values())
        if not numbers or not all(1 <= value <= 2**24 for value in values.values()) or values["layers"] > 64:
            raise ModelError(f"{where}: the router in smelt.json is not described by {', '.join(sorted(names))}.")
        config = cls(**values)
        if config.width // config.heads % 2:
            raise ModelError(f"{where}: the router in smelt.json has a width of {config.width}, which RoPE cannot use.")
        return config


class ExpertRouter(nn.Module):
    """Token ids [batch, tokens] -> logits [batch, tokens, experts]."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList([RouterBlock(config) for _ in range(config.layers)])
        self.norm = nn.Parameter(torch.ones(config.width))
        self.head = nn.Linear(config.width, config.experts, bias=False)

    def init_weights(self, embeddings: Tensor, generator: torch.Generator) -> None:
        """Cut the table [vocabulary, hidden] of a language model to the router's width; draw the rest (Kaiming)."""
        with torch.no_grad():
            self.embed_tokens.weight.copy_(embeddings[: self.config.vocab_size, : self.config.width])
            for layer in self.modules():
                if isinstance(layer, nn.Linear):
                    nn.init.kaiming_uniform_(layer.weight, a=5**0.5, generator=generator)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None, first_layer: int = 0,
        *, last_only: bool = False,
    ) -> Tensor:  # fmt: skip
        """`attention_mask` [batch, cached and new tokens] is zero for padding; with a cache, keys and values are its
        layers from `first_layer` on. `last_only`: return the logits of the last token alone, [batch, 1, experts]."""
        x = F.embedding(input_ids, self.embed_tokens.weight).float()
        for index, block in enumerate(self.layers):
            is_last = index == len(self.layers) - 1
            x = block(x, attention_mask, cache, first_layer + index, 1 if last_only and is_last else x.shape[1])
        return _linear(_norm(x, self.norm), self.head)

    @torch.no_grad()
    def route(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Return the expert of each token, [batch, tokens]; `options` are those of `forward`."""
        with torch.autocast(input_ids.device.type, enabled=False):  # the same in mixed-precision training
            return self(input_ids, attention_mask, **options).argmax(dim=-1)

    def shares(self, input_ids: Tensor) -> list[float]:
        """Return the fraction of these tokens that each expert gets."""
        routed = torch.cat([self.route(part).flatten() for part in input_ids.split(64)])
        counts = torch.bincount(routed.cpu(), minlength=self.config.experts)
        return [round(share, 4) for share in (counts.double() / counts.sum()).tolist()]


class RouterBlock(nn.Module):
    """Causal attention over a window, then a feed-forward of two matrices with SiLU; both after RMSNorm."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.heads, self.window = config.heads, config.window
        self.attention_norm = nn.Parameter(torch.ones(config.width))
        self.feed_forward_norm = nn.Parameter(torch.ones(config.width))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"):
            self.add_module(name, nn.Linear(config.width, config.width, bias=False))

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, cache: Cache | None, layer: int, num_outputs: int
    ) -> Tensor:
        """Return the results of the last `num_outputs` tokens; the others only have keys and values."""
        normalized = _norm(x, self.attention_norm)
        skipped = x.shape[1] - num_outputs
        x = x[:, skipped:]
        queries, keys, values = (
            _linear(tokens, self.get_submodule(name)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name, tokens in (("q_proj", normalized[:, skipped:]), ("k_proj", normalized), ("v_proj", normalized))
        )  # [batch, heads, tokens, head_dim]
        start = 0
        if cache is not None:
            while len(cache.layers) <= layer:
                cache.layers.append(DynamicLayer())
            start = int(cache.layers[layer].get_seq_length())
            cached = cache.layers[layer].update(_rotate(keys, start), values)
            keys, values = (tensor.float() for tensor in cached[:2])
        else:
            keys = _rotate(keys, 0)
        context = self._attend(_rotate(queries, start + skipped), keys, values, attention_mask)
        x = x + _linear(context, self.get_submodule("o_proj"))
        inner = F.silu(_linear(_norm(x, self.feed_forward_norm), self.get_submodule("up_proj")))
        return x + _linear(inner, self.get_submodule("down_proj"))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the contexts [batch, tokens, width] of the last tokens, in parts so that memory stays linear."""
        tokens, before = queries.shape[2], keys.shape[2] - queries.shape[2]
        contexts = []
        for first in range(0, tokens, _QUERIES):
            last = min(first + _QUERIES, tokens)
            low = max(before + first - self.window + 1, 0)
            at = torch.arange(before + first, before + last, device=keys.device)[:, None]
            from_ = torch.arange(low, before + last, device=keys.device)[None]
            allowed = (from_ <= at) & (from_ > at - self.window)
            if attention_mask is not None:
                present = attention_mask[:, None, None, low : before + last].bool()
                allowed = (allowed & present) | (from_ == at)  # padding attends to itself: no row is empty
            part = slice(low, before + last)
            contexts.append(
                F.scaled_dot_product_attention(
                    queries[:, :, first:last], keys[:, :, part], values[:, :, part], attn_mask=allowed
                )
            )
        return torch.cat(contexts, dim=2).transpose(1, 2).flatten(2)


def _linear(x: Tensor, layer: Any) -> Tensor:
    return F.linear(x, layer.weight.float())


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.float(), _EPSILON)


def _rotate(x: Tensor, start: int) -> Tensor:
    """Apply RoPE to [batch, heads, tokens, head_dim], whose first token has the position `start`."""
    half = x.shape[-1] // 2
    frequencies = _THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(start, start + x.shape[2], device=x.device, dtype=torch.float32)[:, None] * frequencies
    cosines, sines = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
