"""SnapKV: attention of the last window of queries, pooled over neighboring tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from smelt.errors import ConfigError
from smelt.kvcache.eviction.scorer import SCORERS, AttentionInputs, Scorer, last_query_logits


@SCORERS.register(
    "snapkv",
    paper="Li et al., SnapKV: LLM Knows What You are Looking for Before Generation, NeurIPS 2024 (arXiv 2404.14469)",
)
@dataclass(frozen=True)
class SnapKV(Scorer):
    """Score by the attention of the last `window` queries; a good default where the question ends the prompt.

    The mean attention of these queries, pooled over neighboring tokens before the window (zeros beyond
    the ends count in a mean) and then over the group. The defaults are those of kvpress; the original code has
    `pool: max`, and Tangram `window: 32`, `kernel: 7`, `pool: max`, `sharing: max`."""

    window: int = 64  # last tokens: their queries observe the prompt, and they are retained
    kernel: int = 5  # neighboring tokens pooled
    pool: str = "mean"  # or max
    sharing: str = "mean"  # over the query group: mean after the softmax, or max before it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError("snapkv: window is 0; it is what observes the prompt, so at least 1.")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"snapkv: kernel is {self.kernel}; it must be odd and positive.")
        for name in ("pool", "sharing"):
            if getattr(self, name) not in ("mean", "max"):
                raise ConfigError(f"snapkv: {name} is {getattr(self, name)!r}; it is mean or max.")

    def score(self, inputs: AttentionInputs) -> Tensor:
        scores = inputs.keys.new_full(inputs.keys.shape[:3], torch.inf, dtype=torch.float32)
        before = inputs.seq_len - self.window
        if before > 0:
            scores[..., :before] = self._pooled(self._observed(inputs)[..., :before])
        return scores

    def _observed(self, inputs: AttentionInputs) -> Tensor:
        """Return the mean attention of the window: [batch, kv_heads, group or 1, tokens]."""
        logits = last_query_logits(inputs, self.window)
        if self.sharing == "max":
            logits = logits.amax(dim=2, keepdim=True)
        return logits.softmax(dim=-1).mean(dim=-2)

    def _pooled(self, attention: Tensor) -> Tensor:
        """Pool over neighbors, then the group: [batch, kv_heads, group or 1, tokens] -> [batch, kv_heads, tokens]."""
        pool = functional.max_pool1d if self.pool == "max" else functional.avg_pool1d
        pooled: Tensor = pool(attention.flatten(0, 1), self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.mean(dim=1).unflatten(0, attention.shape[:2])
