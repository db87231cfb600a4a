"""Token capacity in slots, against a cache that is filled token by token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smelt.kvcache.streaming.config import BoundedCacheSize


@given(st.integers(1, 20), st.integers(1, 12), st.integers(0, 9))
def test_capacity_matches_a_cache_filled_token_by_token(keep: int, per_cycle: int, reserved: int) -> None:
    size = BoundedCacheSize(keep + per_cycle + reserved, keep, reserved)
    length = 0
    for token in range(100):
        assert size.length(token) == length
        compresses = length == keep + per_cycle
        length = keep if compresses else length
        assert size.compresses_at(token) == compresses and size.slot(token) == length
        assert size.tokens_until_full(token) == keep + per_cycle - length
        length += 1
