"""Attention in parts: each part of a text gives its result and its log-sum-exp, and these give the whole result.

With m = max_i m_i, l = sum_i l_i e^(m_i - m) and o = sum_i o_i l_i e^(m_i - m) / l it does not matter where the parts
lie: on devices with their own memory, or some on the GPU and the others near memory. How PNM-KV and PnG-KV (arXiv
2511.00321) divide the work is not known in detail; only the identity is used here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def part_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of one part: queries [..., group, width], keys and values [..., tokens, width] -> results [..., group, width]
    and log-sum-exp [..., group], both float32. A part without tokens gives zeros and minus infinity."""
    products = scale * queries.float() @ keys.float().transpose(-1, -2)  # [..., group, tokens]
    total = products.logsumexp(-1)
    weights = (products - total.unsqueeze(-1)).exp()
    return weights @ values.float(), total


def merged(results: Sequence[Tensor], totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The result of all parts together and its log-sum-exp, so that parts of parts can be merged too."""
    each, sums = torch.stack(tuple(results)), torch.stack(tuple(totals))  # [parts, ..., group, width], less the width
    largest = sums.amax(0)
    base = torch.where(largest.isfinite(), largest, 0.0)  # all parts empty
    weights = (sums - base).exp()
    whole = weights.sum(0)
    found = (each * weights.unsqueeze(-1)).sum(0) / whole.clamp(min=torch.finfo(whole.dtype).tiny).unsqueeze(-1)
    return found, base + whole.log()


def split_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float, devices: int) -> Tensor:
    """As if the tokens lay on so many devices, in runs of about the same length; more devices than tokens leave some
    with none."""
    parts = zip(keys.tensor_split(devices, -2), values.tensor_split(devices, -2), strict=True)
    found = [part_attention(queries, part_keys, part_values, scale) for part_keys, part_values in parts]
    return merged([each for each, _ in found], [total for _, total in found])[0]
