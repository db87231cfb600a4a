"""Scorers of tokens, one file each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from smelt.errors import ConfigError
from smelt.kvcache.eviction.scorer import Scorer
from smelt.kvcache.eviction.scorers.expected import ExpectedAttention
from smelt.kvcache.eviction.scorers.keydiff import KeyDiff
from smelt.kvcache.eviction.scorers.knorm import Knorm
from smelt.kvcache.eviction.scorers.kvzip import KVzip
from smelt.kvcache.eviction.scorers.snapkv import SnapKV
from smelt.kvcache.eviction.scorers.streaming import Streaming
from smelt.kvcache.eviction.scorers.tova import Tova

SCORERS: dict[str, type[Scorer]] = {
    scorer.name: scorer for scorer in (Streaming, Knorm, KeyDiff, Tova, SnapKV, ExpectedAttention, KVzip)
}
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


def make_scorer(name: str, /, **parameters: Any) -> Scorer:
    """A scorer from its name; unknown names, unknown parameters and values of the wrong kind are errors."""
    if name not in SCORERS:
        raise ConfigError(f"there is no scorer {name!r}; there are {', '.join(SCORERS)}.")
    kinds = {field.name: str(field.type) for field in fields(SCORERS[name])}
    for key, value in parameters.items():
        if key not in kinds:
            raise ConfigError(f"the scorer {name} has no parameter {key!r}; it has {', '.join(kinds)}.")
        if isinstance(value, bool) or not isinstance(value, _KINDS[kinds[key]]):
            raise ConfigError(f"{key} of the scorer {name} must be {kinds[key]}, not {value!r}.")
    return SCORERS[name](**parameters)
