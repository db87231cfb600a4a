"""How many tokens each cluster keeps of a text as it is read: fixed by its length, so that room is reserved beforehand.

Tangram (Kim et al., 2026, arXiv 2606.06302): a prompt is compressed chunk after chunk. What a chunk kept is never
judged again, but for its last `window` tokens, which are kept until the next chunk judges them. Ours besides: counts
are rounded up to whole pages, which costs no memory; chunks are about equally long; and a conversation that goes on is
compressed in the same way from where it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.kvcache.eviction.clusters import Clusters
from smelt.kvcache.eviction.profile import Profile
from smelt.kvcache.eviction.scorer import Scorer
from smelt.kvcache.eviction.scorers import scorer_named
from smelt.kvcache.eviction.splits import splits

Counts = np.ndarray[Any, np.dtype[np.int64]]  # [clusters]


@dataclass(frozen=True)
class Retention:
    """Which heads share pages, and what share of the tokens that may go each cluster keeps."""

    clusters: Clusters
    budgets: tuple[float, ...]  # of each cluster
    scorer: Scorer
    block: int  # tokens of a page
    splits: tuple[
        int, ...
    ] = ()  # of each cluster: parts of its keys, relative to one another; from budgets if not given

    def __post_init__(self) -> None:
        if len(self.budgets) != len(self.clusters.members):
            raise ConfigError("there must be one budget a cluster.")
        if self.scorer.repeats:
            raise ConfigError(
                f"{self.scorer.name} reads a prompt twice, which a server does not: profile with another scorer, "
                "such as snapkv or keydiff."
            )

    @classmethod
    def of(cls, profile: Profile, block: int) -> Retention:
        """From a profile: rescaled so that heads keep what it was asked to keep on average."""
        whole = profile if profile.clusters is not None else profile.clustered()
        assert whole.clusters is not None
        largest = tuple(whole.clusters.largest(whole.rescaled(whole.keep)).tolist())
        scorer = scorer_named(whole.scorer, **whole.parameters)
        return cls(whole.clusters, largest, scorer, block, whole.splits)

    @property
    def parts(self) -> Tensor:
        """[layers, kv_heads]: of each head."""
        found = torch.tensor(self.splits) if self.splits else splits(torch.tensor(self.budgets))
        return found[self.clusters.cluster]

    def kept(self, before: Counts, tokens: int, first: bool) -> Counts:
        """What clusters hold that held `before` and have read so many tokens more; `first` where these begin a text."""
        always = self.scorer.window + (self.scorer.sink if first else 0)
        if tokens <= always:
            return before + tokens
        shares = np.round(np.array(self.budgets) * (tokens - always), 6)
        wanted = before + always + np.ceil(shares).astype(np.int64)
        return np.minimum(-(-wanted // self.block) * self.block, before + tokens)


@dataclass(frozen=True)
class Kept:
    """What a request holds: of what was carried over, of its prompt, and all that it wrote itself."""

    retention: Retention
    before: Counts  # carried over
    start: int  # tokens of which that is left
    stop: int  # where the prompt ends

    @classmethod
    def nothing(cls, retention: Retention, stop: int) -> Kept:
        return cls(retention, np.zeros(len(retention.budgets), dtype=np.int64), 0, stop)

    def lengths(self, tokens: int) -> Counts:
        """Tokens that each cluster holds once so many of the text are read."""
        read = min(tokens, self.stop)
        return self.retention.kept(self.before, read - self.start, self.start == 0) + (tokens - read)

    def pages(self, tokens: int) -> Counts:
        """Pages of each cluster then. Those of a prompt are reserved before it is read."""
        block = self.retention.block
        return -(-self.lengths(max(tokens, self.stop)) // block)

    def chunk(self, done: int, most: int) -> int:
        """Tokens of the next chunk: all are about equally long, and none longer than `most`."""
        left = self.stop - done
        return -(-left // -(-left // most))

    def judged(self, start: int, stop: int) -> Judged | None:
        """What is decided after the chunk from token `start` to `stop`; None where all of it stays."""
        before, after = self.lengths(start), self.lengths(stop)
        raw = before + stop - start
        if (after == raw).all():
            return None
        scorer = self.retention.scorer
        opens = start == self.start
        sink = scorer.sink if self.start == 0 else 0
        old = 0 if opens else max(min(scorer.window, start - self.start - sink), 0)  # of the chunk before
        region = old + stop - start
        window = min(scorer.window, region)
        return Judged(
            scorer if opens and sink else replace(scorer, sink=0), region, window, raw - region, after - raw + region
        )


@dataclass(frozen=True)
class Judged:
    """The last `region` tokens of every head are scored; the last `window` of them stay."""

    scorer: Scorer
    region: int
    window: int
    locked: Counts  # tokens before the region, which stay
    chosen: Counts  # of the region, the window included
