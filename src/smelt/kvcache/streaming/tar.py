"""TaR, temporal-axis redundancy (InfiniPot-V, arXiv 2506.15745): a token that looks like the same patch of the recent
frames tells nothing new."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def novelty_in_time(keys: Tensor, patch: Tensor, recent: Tensor) -> Tensor:
    """s(f, j) = -(1/r) * sum over recent frames m of cos(k_fj, k_mj), at least -1 and higher for what stays.

    Keys [kv_heads, tokens, width] are those of older frames as they lie in the cache, each of the patch j that `patch`
    [kv_heads, tokens] says, so that the definition holds also when heads have lost tokens of these frames; `recent` are
    the keys of whole frames [kv_heads, r, patches, width]. Returns [kv_heads, tokens], float32.
    """
    mean = F.normalize(recent.float(), dim=-1).mean(dim=1)  # [kv_heads, patches, width]
    same = mean.gather(1, patch[..., None].expand(-1, -1, keys.shape[-1]))  # [kv_heads, tokens, width]
    found = -(F.normalize(keys.float(), dim=-1) * same).sum(dim=-1)
    return torch.round(found, decimals=5)  # without the noise of floating point, so that equal frames are equal
