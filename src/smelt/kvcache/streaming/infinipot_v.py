"""InfiniPot-V: retain frame tokens without a similar recent token (TaR) and tokens with a large value norm (VaN)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.errors import ConfigError
from smelt.kvcache.streaming.bounded_cache import topk_in_order
from smelt.kvcache.streaming.frame_rule import FRAME_RULES, FrameRule, FrameTokens

POOL_KERNELS = (7, 5, 3)  # of the first three quarters of the depth; the last is not pooled


@FRAME_RULES.register(
    "infinipot-v",
    paper="Kim et al., InfiniPot-V: Memory-Constrained KV Cache Compression for Streaming Video Understanding, "
    "NeurIPS 2025 (arXiv 2506.15745)",
)
@dataclass(frozen=True)
class InfiniPotV(FrameRule):
    """Retain what changed (TaR) and what carries large values (VaN); the default for video.

    Of the retained tokens, the share `tar` is selected by TaR: all tokens of the last `recent` share of the frames and
    the best older ones; the rest by VaN. Defaults are those of the released code. VaN breaks ties of TaR.

    The paper averages VaN over neighbors; the released code has that switched off, and so is `pooling` here. It is
    done once, over the frames that are new when the cache is compressed: later their neighbors are gone.
    """

    needs_token_scores: ClassVar[bool] = True

    tar: float = 0.5
    recent: float = 0.25
    pooling: bool = False

    def __post_init__(self) -> None:
        for name in ("tar", "recent"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"infinipot-v: {name} is {getattr(self, name):g}; it is a share, above 0, at most 1.")

    @property
    def needs_grid(self) -> bool:
        return self.pooling

    def check(self, max_frames: int, keep_frames: int) -> None:
        recent = int(self.recent * max_frames)
        if recent < 1:
            raise ConfigError(
                f"infinipot-v: {self.recent:g} of {max_frames} frames is none, and TaR compares with recent ones; "
                "make the cache or `recent` larger."
            )
        if recent > keep_frames - round((1 - self.tar) * keep_frames):
            raise ConfigError(
                f"infinipot-v: {recent} recent frames do not fit into the share {self.tar:g} of {keep_frames} frames "
                "that TaR selects; keep more frames, or make `recent` smaller."
            )

    def token_scores(self, values: Tensor, layer: int, num_layers: int) -> Tensor:
        norms = value_norms(values)
        return pool_by_depth(norms, layer, num_layers) if self.pooling else norms

    def select(self, tokens: FrameTokens, count: int) -> Tensor:
        patches = tokens.patches_per_frame
        recent = int(self.recent * tokens.num_frames)
        older = tokens.num_tokens - recent * patches
        by_tar = count - round((1 - self.tar) * count) - recent * patches  # of the older tokens
        last = tokens.keys[:, older:].unflatten(1, (recent, patches))  # every head holds all of them
        tar = temporal_novelty(tokens.keys[:, :older], tokens.patch_index[:, :older], last)
        order = tokens.token_scores[:, :older].argsort(dim=1, descending=True, stable=True)
        order = order.gather(1, tar.gather(1, order).argsort(dim=1, descending=True, stable=True))
        scores = tokens.token_scores.clone()
        scores[:, older:] = torch.inf
        scores.scatter_(1, order[:, :by_tar], torch.inf)
        return topk_in_order(scores, count)


def temporal_novelty(keys: Tensor, patch_index: Tensor, recent: Tensor) -> Tensor:
    """Return TaR, temporal-axis redundancy: s(f, j) = -(1/r) * sum over recent frames m of cos(k_fj, k_mj), >= -1.

    Keys [kv_heads, tokens, head_dim] are those of older frames as cached, each at patch j = `patch_index` [kv_heads,
    tokens], so the definition also holds when heads have evicted tokens of these frames; `recent` are the keys of full
    frames [kv_heads, r, patches, head_dim]. Returns [kv_heads, tokens], float32; higher is retained.
    """
    mean = F.normalize(recent.float(), dim=-1).mean(dim=1)  # [kv_heads, patches, head_dim]
    same_patch = mean.gather(1, patch_index[..., None].expand(-1, -1, keys.shape[-1]))  # [kv_heads, tokens, head_dim]
    novelty = -(F.normalize(keys.float(), dim=-1) * same_patch).sum(dim=-1)
    return torch.round(novelty, decimals=5)  # without floating-point noise, so that equal frames are equal


def value_norms(values: Tensor) -> Tensor:
    """Return VaN, ||v|| of each token and head, [..., head_dim] -> [...], float32."""
    return values.float().norm(dim=-1)


def pool_by_depth(norms: Tensor, layer: int, num_layers: int) -> Tensor:
    """Average norms of full frames [kv_heads, frames, rows, columns] over neighbors: in the first quarter of the layers
    over time, rows and columns, in the second over rows and columns, in the third along the token sequence, in the last
    not at all. A kernel is odd and at most as long as the shortest side; zeros beyond the ends count."""
    quarter = 4 * layer // num_layers
    if quarter == len(POOL_KERNELS):
        return norms
    shortest = min(norms.shape[1:])
    kernel = min(POOL_KERNELS[quarter], shortest - (shortest + 1) % 2)
    padding = kernel // 2
    if quarter == 0:
        return F.avg_pool3d(norms[:, None], kernel, stride=1, padding=padding)[:, 0]
    if quarter == 1:
        return F.avg_pool2d(norms, kernel, stride=1, padding=padding)
    return F.avg_pool1d(norms.flatten(1)[:, None], kernel, stride=1, padding=padding)[:, 0].view_as(norms)
