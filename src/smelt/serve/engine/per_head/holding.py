"""What a request has of a pool whose pages belong to clusters of heads."""

from __future__ import annotations

from dataclasses import dataclass, field

from smelt.kvcache.eviction.policy import ClusterCounts, RequestRetention


@dataclass(eq=False)
class PerHeadCacheState:
    """`places` are those of the request's blocks in its table, in the same order: cluster * width + page."""

    kept: RequestRetention
    pages: ClusterCounts  # of each cluster
    places: list[int] = field(default_factory=list)
    tails: dict[int, int] = field(default_factory=dict)  # place -> another's page that is not full, to be copied
    enough: int = -1  # tokens up to which no further page is needed
