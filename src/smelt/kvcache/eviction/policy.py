"""How many tokens each cluster retains during prefill: a function of its length, so pages can be reserved.

Tangram (Kim et al., 2026, arXiv 2606.06302): a prompt is compressed chunk by chunk. Tokens retained from a chunk are
never scored again, except its last `window` tokens, which stay until the next chunk is scored. Our additions: counts
are rounded up to full pages, which costs no memory; chunks have about equal length; and a continued conversation is
compressed in the same way from where it stopped. As in the released code, a cluster never retains fewer tokens than a
floor, so short prompts stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.clusters import HeadClusters, splits_per_cluster
from smelt.kvcache.eviction.profile import EvictionProfile
from smelt.kvcache.eviction.scorer import Scorer
from smelt.kvcache.eviction.scorers import make_scorer

ClusterCounts = np.ndarray[Any, np.dtype[np.int64]]  # [clusters]


@dataclass(frozen=True)
class EvictionPolicy:
    """Clusters of heads that share pages, and the ratio of evictable tokens each cluster retains."""

    clusters: HeadClusters
    budgets: tuple[float, ...]  # [clusters]
    scorer: Scorer
    block_size: int  # tokens per page
    num_splits: tuple[int, ...] = ()  # [clusters]: relative number of KV splits; derived from the budgets if empty
    min_tokens: int = 0  # that every cluster retains of a text that has them, rounded up to full pages

    def __post_init__(self) -> None:
        if len(self.budgets) != len(self.clusters.members):
            raise ConfigError("there must be one budget per cluster.")
        if self.scorer.needs_reconstruction:
            raise ConfigError(
                f"{self.scorer.name} reads a prompt twice, which a server does not: profile with another scorer, "
                "such as snapkv or keydiff."
            )

    @classmethod
    def from_profile(cls, profile: EvictionProfile, block_size: int, min_tokens: int = 0) -> EvictionPolicy:
        """Rescale the budgets of a profile so that heads retain its `keep_ratio` on average."""
        clustered = profile if profile.clusters is not None else profile.with_clusters()
        assert clustered.clusters is not None
        budgets = tuple(clustered.clusters.cluster_max(clustered.rescaled(clustered.keep_ratio)).tolist())
        scorer = make_scorer(clustered.scorer, **clustered.scorer_params)
        return cls(clustered.clusters, budgets, scorer, block_size, clustered.num_splits, min_tokens)

    @property
    def head_splits(self) -> Tensor:
        """Relative number of KV splits of each head: [layers, kv_heads]."""
        per_cluster = (
            torch.tensor(self.num_splits) if self.num_splits else splits_per_cluster(torch.tensor(self.budgets))
        )
        return per_cluster[self.clusters.cluster]

    def retained(self, carried: ClusterCounts, num_tokens: int, first: bool) -> ClusterCounts:
        """Return the tokens that each cluster holds after `num_tokens` more on top of `carried`; `first`: they begin a
        text."""
        always = self.scorer.window + (self.scorer.sink if first else 0)
        if num_tokens <= always:
            return carried + num_tokens
        evictable = np.round(np.array(self.budgets) * (num_tokens - always), 6)
        counts = np.maximum(carried + always + np.ceil(evictable).astype(np.int64), self.min_tokens)
        return np.minimum(-(-counts // self.block_size) * self.block_size, carried + num_tokens)


@dataclass(frozen=True)
class RequestRetention:
    """Tokens that one request holds: carried over from a cached text, retained from its prompt, and generated."""

    policy: EvictionPolicy
    carried: ClusterCounts  # tokens carried over
    start: int  # tokens of the text that were compressed to `carried`
    stop: int  # end of the prompt

    @classmethod
    def empty(cls, policy: EvictionPolicy, stop: int) -> RequestRetention:
        return cls(policy, np.zeros(len(policy.budgets), dtype=np.int64), 0, stop)

    def lengths(self, num_tokens: int) -> ClusterCounts:
        """Return the tokens that each cluster holds once `num_tokens` of the text are computed."""
        prefilled = min(num_tokens, self.stop)
        return self.policy.retained(self.carried, prefilled - self.start, self.start == 0) + (num_tokens - prefilled)

    def num_pages(self, num_tokens: int) -> ClusterCounts:
        """Return the pages of each cluster at that point. Pages of the prompt are reserved before prefill."""
        block_size = self.policy.block_size
        return -(-self.lengths(max(num_tokens, self.stop)) // block_size)

    def next_chunk(self, computed: int, max_tokens: int) -> int:
        """Return the tokens of the next prefill chunk: chunks have about equal length, at most `max_tokens`."""
        left = self.stop - computed
        return -(-left // -(-left // max_tokens))

    def eviction_step(self, start: int, stop: int) -> EvictionStep | None:
        """Return what to evict after the chunk from token `start` to `stop`; None if all of it is retained."""
        before, after = self.lengths(start), self.lengths(stop)
        uncompressed = before + stop - start
        if (after == uncompressed).all():
            return None
        scorer = self.policy.scorer
        opens = start == self.start
        sink = scorer.sink if self.start == 0 else 0
        previous = 0 if opens else max(min(scorer.window, start - self.start - sink), 0)  # window of the chunk before
        region = previous + stop - start
        window = min(scorer.window, region)
        return EvictionStep(
            scorer if opens and sink else replace(scorer, sink=0),
            region,
            window,
            uncompressed - region,
            after - uncompressed + region,
        )


@dataclass(frozen=True)
class EvictionStep:
    """Score the last `region` tokens of every head and evict some; the last `window` of them are retained."""

    scorer: Scorer
    region: int
    window: int
    locked: ClusterCounts  # tokens before the region, which are retained
    retained: ClusterCounts  # tokens of the region, the window included
