"""Attention over the paged KV cache, registered with transformers by name.

The network runs eagerly, so pruned layers, layers without attention and quantized ones need no special handling. It is
called with all tokens of a step as one sequence; the attention metadata says which tokens belong to which request. So
nothing else in the network may mix positions: `unpaged_reason` names the networks that need a cache of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from smelt.errors import ModelError
from smelt.kernels.attention_metadata import AttentionMetadata, AttentionVariant, LayerKVPages
from smelt.kernels.kv_quant import KVQuantFormat, quantize_qkv, row_layout
from smelt.kernels.paged import allocate_kv_pages, paged_attention, store_kv
from smelt.models.anatomy import Anatomy
from smelt.models.families import GENERIC

ATTN_IMPLEMENTATION = "smelt-paged"
PAGED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}  # of `layer_types` in a config
# (layer, queries, keys, values [tokens, heads, head_dim], softmax scale, sliding window) -> [tokens, heads, head_dim]
AttentionFn = Callable[..., Tensor]  # a function that has the attribute `variants` takes an AttentionVariant as well
_context = local()


@dataclass(frozen=True)
class PagedCache:
    """KV cache of each layer, [num_blocks, block_size, kv_heads, head_dim], or bytes of quantized rows. Layers with
    pruned heads have fewer kv_heads. A layer that uses the attention map of another one has the pages of its keys."""

    keys: dict[int, Tensor]  # layer -> pages
    values: dict[int, Tensor]
    block_size: int
    kv_quant: dict[int, KVQuantFormat | None]  # layer -> format of quantized rows

    @classmethod
    def empty(
        cls,
        anatomy: Anatomy,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: str | None = None,
    ) -> PagedCache:
        """Allocate a cache with quantized rows of `kv_cache_dtype`; None: rows of the model's own dtype."""
        shapes, leaders = _attention_layers(anatomy), _map_leaders(anatomy)
        kv_quant = {layer: kv_quant_format(kv_cache_dtype, head_dim) for layer, (_, head_dim) in shapes.items()}

        def pages(layer: int) -> Tensor:
            num_kv_heads, head_dim = shapes[layer]
            row_size, row_dtype = row_layout(kv_quant[layer], head_dim, dtype)
            return allocate_kv_pages((num_blocks, block_size, num_kv_heads, row_size), row_dtype, device)

        keys = {layer: pages(layer) for layer in shapes if layer not in leaders}
        keys |= {layer: keys[leader] for layer, leader in leaders.items()}
        return cls(keys, {layer: pages(layer) for layer in shapes}, block_size, kv_quant)

    def layer(self, index: int) -> LayerKVPages:
        return LayerKVPages(
            self.keys[index], self.values[index], self.keys[index].shape[2], kv_quant=self.kv_quant[index]
        )


def kv_quant_format(kv_cache_dtype: str | None, head_dim: int) -> KVQuantFormat | None:
    """Return how a row of the KV cache is quantized; None: it has the model's dtype."""
    return None if kv_cache_dtype is None else KVQuantFormat.for_head_dim(kv_cache_dtype, head_dim)


def block_bytes(anatomy: Anatomy, block_size: int, dtype: torch.dtype, kv_cache_dtype: str | None = None) -> int:
    """Return the KV cache bytes of one block over all layers."""
    layers = _attention_layers(anatomy)
    if not layers:  # a cache of the network's own, of unknown size
        return 2 * block_size * anatomy.hidden_size * len(anatomy.blocks) * dtype.itemsize
    leaders = _map_leaders(anatomy)
    return sum(
        (1 if layer in leaders else 2) * block_size * num_kv_heads * row_bytes(head_dim, dtype, kv_cache_dtype)
        for layer, (num_kv_heads, head_dim) in layers.items()
    )


def row_bytes(head_dim: int, dtype: torch.dtype, kv_cache_dtype: str | None) -> int:
    """Return the bytes of one head's key or value of one token."""
    row_size, row_dtype = row_layout(kv_quant_format(kv_cache_dtype, head_dim), head_dim, dtype)
    return row_size * row_dtype.itemsize


def _attention_layers(anatomy: Anatomy) -> dict[int, tuple[int, int]]:
    """Return the number of KV heads and head_dim of every layer that has attention."""
    if not anatomy.family.causal:
        raise ModelError("only causal language models can be served.")
    if not _attention_is_known(anatomy):
        return _traced_attention(anatomy.network)
    parts = [part for part in anatomy.parts if part.kind == "heads" and part.units]
    return {part.block: (part.units, part.head_dim) for part in parts}


def _map_leaders(anatomy: Anatomy) -> dict[int, int]:
    """Return the layers that use the attention map of another one, and which."""
    return {part.block: part.map_of for part in anatomy.parts if part.map_of is not None}


def _attention_is_known(anatomy: Anatomy) -> bool:
    """Return whether every block has attention among its parts."""
    return all(any(part.kind == "heads" for part in block.parts) for block in anatomy.blocks)


def unpaged_reason(anatomy: Anatomy) -> str | None:
    """Return why the KV cache of a network cannot be paged; None if it can."""
    network, model_type = anatomy.network, anatomy.network.config.model_type
    layer_types = set(getattr(network.config.get_text_config(), "layer_types", None) or ())
    if anatomy.family.stateful or layer_types - PAGED_LAYERS:
        return f"{model_type} has layers that carry a state from token to token"
    attention = anatomy.family.attention
    if attention is not None and not attention.interface:
        return f"transformers computes the attention of {model_type} in the network itself"
    is_whole = anatomy.backbone is network.base_model  # otherwise more than the language model decides what is attended
    if _attention_is_known(anatomy):
        return None if is_whole or _computes_the_same(network) else _differs(model_type)
    if set(_traced_attention(network)) != set(range(len(anatomy.blocks))):
        return f"not every block of {model_type} uses transformers' attention interface"
    if anatomy.family.name == GENERIC and not _computes_the_same(network):
        return _differs(model_type)
    return None


def _differs(model_type: str) -> str:
    return f"{model_type} computes something else with paged attention"


@torch.inference_mode()
def _traced_attention(network: PreTrainedModel) -> dict[int, tuple[int, int]]:
    """Run one token; return the KV heads and head_dim of every layer that calls the attention interface."""
    shapes: dict[int, tuple[int, int]] = {}

    def trace(layer: int, queries: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> Tensor:
        shapes[layer] = (keys.shape[1], keys.shape[2])
        return torch.zeros_like(queries)

    token = torch.zeros(1, 1, dtype=torch.int64, device=network.device)
    with _implementation(network), use_attention(trace), suppress(TypeError, ValueError, AttributeError):
        network(input_ids=token, position_ids=token, use_cache=False)
    return shapes


@torch.inference_mode()
def _computes_the_same(network: PreTrainedModel) -> bool:
    """Compare paged attention over two sequences in one step with the network's own attention over each of them."""
    lengths, tokens = (7, 5), torch.arange(12, device=network.device) % network.config.get_text_config().vocab_size
    expected = [network(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split(list(lengths))]

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None,
               variant: AttentionVariant | None = None) -> Tensor:  # fmt: skip
        key_pages, value_pages = (
            torch.stack([F.pad(part, (0, 0, 0, 0, 0, 8 - len(part))) for part in tensor.split(list(lengths))])
            for tensor in (keys, values)
        )
        return paged_attention(queries, key_pages, value_pages, metadata, scale, window, None, variant)

    attend.variants = True  # type: ignore[attr-defined]
    device = network.device
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, 7, 12], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.tensor([[0], [1]], dtype=torch.int32, device=device),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device), max_seq_len=7, query_lens=lengths,
    )  # fmt: skip
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    with _implementation(network), use_attention(attend):
        actual = network(input_ids=tokens[None], position_ids=positions[None], use_cache=False).logits[0]
    reference = torch.cat(expected).float()
    tolerance = 1e-3 if network.dtype == torch.float32 else 0.1
    return bool((actual.float() - reference).abs().max() <= tolerance * reference.std())


@contextmanager
def _implementation(network: PreTrainedModel) -> Iterator[None]:
    """Use paged attention in the network inside the context."""
    before = network.config._attn_implementation
    network.set_attn_implementation(ATTN_IMPLEMENTATION)
    try:
        yield
    finally:
        network.set_attn_implementation(before)


def paged_attention_fn(cache: PagedCache, metadata: AttentionMetadata) -> AttentionFn:
    """Return attention that reads and writes this cache."""

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None,
               variant: AttentionVariant | None = None) -> Tensor:  # fmt: skip
        key_pages, value_pages, kv_quant = cache.keys[layer], cache.values[layer], cache.kv_quant[layer]
        queries, keys, values = quantize_qkv(kv_quant, queries, keys, values)
        store_kv(keys, values, key_pages, value_pages, metadata.slot_mapping)
        return paged_attention(queries, key_pages, value_pages, metadata, scale, window, kv_quant, variant)

    attend.variants = True  # type: ignore[attr-defined]
    return attend


@contextmanager
def use_attention(attention_fn: AttentionFn) -> Iterator[None]:
    """Use this attention function in the network inside the context, in this thread."""
    _context.attention_fn = attention_fn
    try:
        yield
    finally:
        del _context.attention_fn


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim].

    Values may be narrower than keys (multi-head latent attention); the cache has rows of the width of keys for both.
    A layer that uses this one's map attends with its own values: the keys are written to their slots again, unchanged.
    """
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    window, attention_fn, variant = options.get("sliding_window"), _context.attention_fn, _variant(module, options)
    if variant is not None and not getattr(attention_fn, "variants", False):
        raise ModelError(
            "this model's attention has soft-capping, sinks or chunks, which need a complete paged KV cache; leave out "
            "eviction, selection and caps."
        )

    def attend(layer: int, value: Tensor) -> Tensor:
        width = value.shape[-1]
        if width < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - width))
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        extra = () if variant is None else (variant,)
        output: Tensor = attention_fn(layer, queries, keys, values, scale, window, *extra)
        return output[..., :width][None]

    layer: Any = module.layer_idx
    slot: Any = getattr(module, "smelt_map_slot", None)
    if slot is not None:
        slot.hold(attend)
    return attend(layer, value), None


def _variant(module: Any, options: dict[str, Any]) -> AttentionVariant | None:
    """Return what the attention of a module computes beyond the usual; None: nothing."""
    config: Any = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None)
    chunked = layer_types is not None and layer_types[module.layer_idx] == "chunked_attention"
    variant = AttentionVariant(
        options.get("softcap"), options.get("s_aux"), config.attention_chunk_size if chunked else None
    )
    return None if variant == AttentionVariant() else variant


AttentionInterface.register(ATTN_IMPLEMENTATION, _attention)
