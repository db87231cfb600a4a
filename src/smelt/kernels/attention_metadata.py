"""Where the tokens of a batch and their KV cache are: sequence lengths, block tables, the pages of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from smelt.kernels.kv_quant import KVQuantFormat

# Tokens up to which a single request decodes fastest with one cluster of blocks per head, on Hopper GPUs. Beyond, its
# keys need more blocks than a cluster has.
SHORT_CONTEXT = 2048


@dataclass(frozen=True)
class AttentionMetadata:
    """Token layout of a batch and the location of its KV cache. All tensors are int32 except `slot_mapping`."""

    cu_seqlens_q: Tensor  # [requests + 1]: where the new tokens of each request start
    seq_lens: Tensor  # [requests]: tokens of each request in the KV cache, new ones included
    block_tables: Tensor  # [requests, max blocks]: blocks of each request in order
    slot_mapping: Tensor  # [tokens], int64: cache slot of each new token, block * block_size + offset
    max_seq_len: int = 0  # an upper bound of `seq_lens`
    query_lens: Sequence[int] = ()  # new tokens per request, if known on the host
    # With per-cluster pages, block_tables is [slots, clusters, max blocks], and:
    request_slots: Tensor | None = None  # [requests], int64: row of block_tables of each request
    seq_len_offsets: Tensor | None = None  # [slots, clusters]: tokens a cluster keeps minus tokens of the sequence


@dataclass(frozen=True)
class AttentionVariant:
    """What some families compute beyond softmax(scale * Q K^T) V over a window."""

    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [heads]: one more score per head in the softmax, without a value
    chunk: int | None = None  # a query attends to positions of its own chunk of so many positions


class LayerKVPages(NamedTuple):
    """KV cache of one layer, [blocks, block_size, heads per page, head_dim] each."""

    keys: Tensor
    values: Tensor
    num_kv_heads: int
    head_cluster: Tensor | None = None  # [kv heads], int64: cluster of each head, if clusters have their own pages
    head_column: Tensor | None = None  # [kv heads], int64: index of each head in its cluster
    heads_per_page: int = 0
    kv_quant: KVQuantFormat | None = None  # if set, the last axis holds quantized rows in bytes
