"""How much attention each token of a prompt gets while the network repeats the prompt (KVzip: Kim et al., 2025).

What would be looked at to say the text again is what any later question may need.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smelt.kernels.paged import causal_mask
from smelt.kvcache.eviction.attention import attending
from smelt.kvcache.eviction.prefill import RecordedPrefill
from smelt.models.model import Model

BEFORE = 8  # tokens before a later piece, by which it is asked for


@torch.no_grad()
def record_reconstruction(
    model: Model, reading: RecordedPrefill, ids: Tensor, ask: Tensor, *, chunk: int = 2048, sink: int = 4
) -> RecordedPrefill:
    """Let the network repeat the prompt piece by piece after the words `ask` [tokens], and note how much attention each
    token gets at most while that happens. Later pieces are asked for by the tokens before them. What a chat template
    would add around the request is left out."""
    tokens, network = reading.seq_len, model.network
    scores = [torch.zeros_like(seen.keys[..., 0], dtype=torch.float32) for seen in reading.layers]
    layers = {part.block: at for at, part in enumerate(part for part in model.anatomy.parts if part.kind == "heads")}
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        words = torch.cat((ask, ids[0, max(begin - BEFORE, 0) : begin])).expand(len(ids), -1)

        def listen(
            layer: int, queries: Tensor, keys: Tensor, values: Tensor, span: tuple[int, int] = (begin, end)
        ) -> None:
            at = layers[layer]
            found = _most_attention(queries, keys, reading.layers[at].scale, tokens, span, sink)
            scores[at][..., span[0] : span[1]] = found

        with attending(network, listen=listen):
            network(torch.cat((words, ids[:, begin:end]), dim=1), past_key_values=reading.cache(), logits_to_keep=1)
    seen = [replace(each, reconstruction=score) for each, score in zip(reading.layers, scores, strict=True)]
    return replace(reading, layers=seen)


def _most_attention(
    queries: Tensor, keys: Tensor, scale: float, tokens: int, span: tuple[int, int], sink: int
) -> Tensor:  # [batch, kv_heads, end - begin]
    """Of new queries on the first tokens, a span of the prompt, and the new tokens themselves; the largest over queries
    and over the heads that share keys."""
    begin, end = span
    new, first = queries.shape[2], min(sink, begin)
    chosen = torch.cat((keys[:, :, :first], keys[:, :, begin:end], keys[:, :, tokens:]), dim=2)
    grouped = queries.unflatten(1, (keys.shape[1], -1))  # [batch, kv_heads, group, new, width]
    products = (grouped @ chosen[:, :, None].transpose(-1, -2)).float() * scale
    own = causal_mask(new, new, None, queries.device)
    products[..., first + end - begin :].masked_fill_(~own, -torch.inf)
    return products.softmax(-1)[..., first : first + end - begin].amax((2, 3))
