"""SnapKV: what the last window of queries attends to, smoothed over neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from smelt.errors import ConfigError
from smelt.kvcache.eviction.scorer import AttentionInputs, Scorer, last_query_logits


@dataclass(frozen=True)
class SnapKV(Scorer):
    """The mean attention of the queries of `window`, pooled over neighbouring tokens before the window (zeros beyond
    the ends count in a mean) and then over the group. The defaults are those of kvpress; the original code has
    `pool: max`, and Tangram `window: 32`, `kernel: 7`, `pool: max`, `sharing: max`."""

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = (
        "Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, NeurIPS 2024 (arXiv 2404.14469)"
    )

    window: int = 64  # of the last tokens: their queries observe, and they are kept
    kernel: int = 5  # neighbouring tokens pooled
    pool: str = "mean"  # or max
    sharing: str = "mean"  # of a group of query heads: the mean after the softmax, or the max before it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError("snapkv: window is 0; it is what observes the prompt, so at least 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"snapkv: kernel is {self.kernel}; it must be odd and positive.")
        for name in ("pool", "sharing"):
            if getattr(self, name) not in ("mean", "max"):
                raise ConfigError(f"snapkv: {name} is {getattr(self, name)!r}; it is mean or max.")

    def score(self, seen: AttentionInputs) -> Tensor:
        found = seen.keys.new_full(seen.keys.shape[:3], torch.inf, dtype=torch.float32)
        before = seen.seq_len - self.window
        if before > 0:
            found[..., :before] = self._pooled(self._observed(seen)[..., :before])
        return found

    def _observed(self, seen: AttentionInputs) -> Tensor:
        """[batch, kv_heads, group or 1, tokens]"""
        logits = last_query_logits(seen, self.window)
        if self.sharing == "max":
            logits = logits.amax(dim=2, keepdim=True)
        return logits.softmax(dim=-1).mean(dim=-2)

    def _pooled(self, attention: Tensor) -> Tensor:
        """[batch, kv_heads, group or 1, tokens] -> [batch, kv_heads, tokens]"""
        pool = functional.max_pool1d if self.pool == "max" else functional.avg_pool1d
        pooled: Tensor = pool(attention.flatten(0, 1), self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.mean(dim=1).unflatten(0, attention.shape[:2])
