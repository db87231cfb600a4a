"""InfiniPot-V: a part of the tokens stays because nothing like them came since (TaR), the others because their values
are long (VaN)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.errors import ConfigError
from smelt.kvcache.streaming.bounded_cache import best_in_order
from smelt.kvcache.streaming.frame_rule import FrameRule, FrameTokens


@dataclass(frozen=True)
class InfiniPotV(FrameRule):
    """Of what stays, the share `tar` is chosen by TaR: all tokens of the last `recent` of the frames, and of the older
    ones the best; the rest by VaN. Defaults are those of the released code. Where TaR finds tokens equal, VaN decides.

    The paper averages VaN over neighbours; the released code has that switched off, and so is `pooling` here. It is
    done once, over the frames that are new when the pot is cooked down: later their neighbours are gone.
    """

    name: ClassVar[str] = "infinipot-v"
    paper: ClassVar[str] = (
        "Kim et al., InfiniPot-V: Memory-Constrained KV Cache Compression for Streaming Video Understanding, "
        "NeurIPS 2025 (arXiv 2506.15745)"
    )
    marked: ClassVar[bool] = True

    tar: float = 0.5
    recent: float = 0.25
    pooling: bool = False

    def __post_init__(self) -> None:
        for name in ("tar", "recent"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"infinipot-v: {name} is {getattr(self, name):g}; it is a share, above 0, at most 1.")

    @property
    def shaped(self) -> bool:
        return self.pooling

    def check(self, frames: int, keep: int) -> None:
        recent = int(self.recent * frames)
        if recent < 1:
            raise ConfigError(
                f"infinipot-v: {self.recent:g} of {frames} frames is none, and TaR compares with recent ones; "
                "make the pot or `recent` larger."
            )
        if recent > keep - round((1 - self.tar) * keep):
            raise ConfigError(
                f"infinipot-v: {recent} recent frames do not fit into the share {self.tar:g} of {keep} frames that TaR "
                "chooses; keep more frames, or make `recent` smaller."
            )

    def marks(self, values: Tensor, layer: int, layers: int) -> Tensor:
        norms = value_norms(values)
        return pooled_by_depth(norms, layer, layers) if self.pooling else norms

    def places(self, held: FrameTokens, count: int) -> Tensor:
        recent = int(self.recent * held.frames)
        older = held.tokens - recent * held.patches
        by_tar = count - round((1 - self.tar) * count) - recent * held.patches  # of the older tokens
        last = held.keys[:, older:].unflatten(1, (recent, held.patches))  # every head holds all of them
        tar = novelty_in_time(held.keys[:, :older], held.patch[:, :older], last)
        order = held.marks[:, :older].argsort(dim=1, descending=True, stable=True)
        order = order.gather(1, tar.gather(1, order).argsort(dim=1, descending=True, stable=True))
        scores = held.marks.clone()
        scores[:, older:] = torch.inf
        scores.scatter_(1, order[:, :by_tar], torch.inf)
        return best_in_order(scores, count)


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
