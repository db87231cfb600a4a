"""VaN, value norm (InfiniPot-V, arXiv 2506.15745): a token whose value is long matters."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

KERNELS = (7, 5, 3)  # of the first three quarters of the depth; the last is not pooled


def value_norms(values: Tensor) -> Tensor:
    """||v|| of each token and head: [..., width] -> [...], float32."""
    return values.float().norm(dim=-1)


def pooled_by_depth(norms: Tensor, layer: int, layers: int) -> Tensor:
    """Norms of whole frames [kv_heads, frames, rows, columns], averaged over neighbours: in the first quarter of the
    layers over time, rows and columns, in the second over rows and columns, in the third along the row of all tokens,
    in the last not at all. A kernel is at most as long as the shortest side, and odd; zeros beyond the ends count."""
    quarter = 4 * layer // layers
    if quarter == len(KERNELS):
        return norms
    shortest = min(norms.shape[1:])
    kernel = min(KERNELS[quarter], shortest - (shortest + 1) % 2)
    around = kernel // 2
    if quarter == 0:
        return F.avg_pool3d(norms[:, None], kernel, stride=1, padding=around)[:, 0]
    if quarter == 1:
        return F.avg_pool2d(norms, kernel, stride=1, padding=around)
    return F.avg_pool1d(norms.flatten(1)[:, None], kernel, stride=1, padding=around)[:, 0].view_as(norms)
