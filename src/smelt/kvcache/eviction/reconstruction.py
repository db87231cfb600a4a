"""Attention on each token of a prompt while the network repeats the prompt (KVzip: Kim et al., 2025, arXiv 2505.23416).

Tokens that are attended to when reconstructing the text are those that any later question may need.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smelt.kernels.paged import causal_mask
from smelt.kvcache.eviction.attention import masked_attention
from smelt.kvcache.eviction.prefill import RecordedPrefill
from smelt.models.model import Model

CONTEXT_TOKENS = 8  # tokens before a later chunk, by which it is requested


@torch.no_grad()
def record_reconstruction(
    model: Model, prefill: RecordedPrefill, ids: Tensor, request: Tensor, *, chunk: int = 2048, sink: int = 4
) -> RecordedPrefill:
    """Let the network repeat the prompt chunk by chunk after the tokens `request`, and record the largest attention on
    each token. Later chunks are requested by the tokens before them. The chat template is left out."""
    tokens, network = prefill.seq_len, model.network
    scores = [torch.zeros_like(inputs.keys[..., 0], dtype=torch.float32) for inputs in prefill.layers]
    parts = [part for part in model.anatomy.parts if part.kind == "heads"]
    layer_index = {part.block: index for index, part in enumerate(parts)}
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        prompt = torch.cat((request, ids[0, max(begin - CONTEXT_TOKENS, 0) : begin])).expand(len(ids), -1)

        def hook(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, span: tuple[int, int] = (begin, end)
        ) -> None:
            index = layer_index[layer]
            attention = _max_attention(queries, keys, prefill.layers[index].scale, tokens, span, sink)
            scores[index][..., span[0] : span[1]] = attention

        with masked_attention(network, hook=hook):
            network(torch.cat((prompt, ids[:, begin:end]), dim=1), past_key_values=prefill.cache(), logits_to_keep=1)
    layers = [replace(inputs, reconstruction=score) for inputs, score in zip(prefill.layers, scores, strict=True)]
    return replace(prefill, layers=layers)


def _max_attention(
    queries: Tensor, keys: Tensor, scale: float, tokens: int, span: tuple[int, int], sink: int
) -> Tensor:  # [batch, kv_heads, end - begin]
    """Return the attention of new queries on the sink, a span of the prompt and the new tokens: the maximum over
    queries and over the query heads that share a KV head."""
    begin, end = span
    new, first = queries.shape[2], min(sink, begin)
    selected = torch.cat((keys[:, :, :first], keys[:, :, begin:end], keys[:, :, tokens:]), dim=2)
    grouped = queries.unflatten(1, (keys.shape[1], -1))  # [batch, kv_heads, group, new, head_dim]
    logits = (grouped @ selected[:, :, None].transpose(-1, -2)).float() * scale
    causal = causal_mask(new, new, None, queries.device)
    logits[..., first + end - begin :].masked_fill_(~causal, -torch.inf)
    return logits.softmax(-1)[..., first : first + end - begin].amax((2, 3))
