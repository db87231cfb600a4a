"""CaP, the catalyst prompt (InfiniPot, arXiv 2410.01518): how much attention the tokens in the pot get from a general
request that is laid behind them for this purpose alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def attention_of(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """The mean attention of the last queries [1, heads, new, width] on the keys [1, kv_heads, tokens + new, width]
    before them, over these queries and over the heads that share keys: [kv_heads, tokens], float32."""
    heads, new = keys.shape[1], queries.shape[2]
    tokens = keys.shape[2] - new
    grouped = queries[0].float().unflatten(0, (heads, -1)).flatten(1, 2)  # [kv_heads, group * new, width]
    products = (grouped @ keys[0].float().mT * scale).unflatten(1, (-1, new))  # [kv_heads, group, new, tokens + new]
    later = torch.ones(new, new, dtype=torch.bool, device=keys.device).triu(1)
    products[..., tokens:].masked_fill_(later, -torch.inf)
    return products.softmax(dim=-1)[..., :tokens].mean(dim=(1, 2))


def pooled(scores: Tensor, kernel: int) -> Tensor:
    """The mean over neighbouring tokens [kv_heads, tokens], as SnapKV has it: zeros beyond the ends count."""
    return F.avg_pool1d(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]
