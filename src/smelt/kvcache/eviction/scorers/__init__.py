"""Scorers, one file each."""

from __future__ import annotations

from typing import Any

from smelt.kvcache.eviction.scorer import SCORERS, Scorer
from smelt.kvcache.eviction.scorers.expected import ExpectedAttention
from smelt.kvcache.eviction.scorers.keydiff import KeyDiff
from smelt.kvcache.eviction.scorers.knorm import Knorm
from smelt.kvcache.eviction.scorers.kvzip import KVzip
from smelt.kvcache.eviction.scorers.snapkv import SnapKV
from smelt.kvcache.eviction.scorers.streaming import Streaming
from smelt.kvcache.eviction.scorers.tova import Tova


def make_scorer(name: str, /, **parameters: Any) -> Scorer:
    """Build a scorer from its name and parameters."""
    return SCORERS.build(name, **parameters)


__all__ = [
    "SCORERS", "ExpectedAttention", "KVzip", "KeyDiff", "Knorm", "SnapKV", "Streaming", "Tova", "make_scorer",
]  # fmt: skip
