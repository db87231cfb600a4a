"""Split-KV attention: merge the partial results of parts of a sequence by their log-sum-exp.

With m = max_i m_i, l = sum_i l_i e^(m_i - m) and o = sum_i o_i l_i e^(m_i - m) / l it does not matter where the parts
are: on several devices, or some on the GPU and others near memory. How PNM-KV and PnG-KV (arXiv 2511.00321) divide the
work is not known in detail; only the identity is used here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def partial_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to one split: queries [..., group, head_dim], keys and values [..., tokens, head_dim].

    Returns outputs [..., group, head_dim] and log-sum-exp [..., group], float32; an empty split gives zeros and -inf.
    """
    logits = scale * queries.float() @ keys.float().transpose(-1, -2)  # [..., group, tokens]
    lse = logits.logsumexp(-1)
    weights = (logits - lse.unsqueeze(-1)).exp()
    return weights @ values.float(), lse


def merge_splits(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the outputs of all splits; also return their log-sum-exp, so that merged splits can be merged again."""
    stacked, sums = torch.stack(tuple(outputs)), torch.stack(tuple(lses))  # [splits, ..., group, head_dim], [.., group]
    largest = sums.amax(0)
    base = torch.where(largest.isfinite(), largest, 0.0)  # all splits empty
    weights = (sums - base).exp()
    total = weights.sum(0)
    output = (stacked * weights.unsqueeze(-1)).sum(0) / total.clamp(min=torch.finfo(total.dtype).tiny).unsqueeze(-1)
    return output, base + total.log()


def split_kv_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float, num_splits: int) -> Tensor:
    """Attend in `num_splits` contiguous splits of about equal length; splits beyond the tokens are empty."""
    splits = zip(keys.tensor_split(num_splits, -2), values.tensor_split(num_splits, -2), strict=True)
    partial = [partial_attention(queries, split_keys, split_values, scale) for split_keys, split_values in splits]
    return merge_splits([output for output, _ in partial], [lse for _, lse in partial])[0]
