"""Where tokens are laid, against a pot that is filled one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from smelt.kvcache.streaming.config import BoundedCacheSize


@given(st.integers(1, 20), st.integers(1, 12), st.integers(0, 9))
def test_places_are_those_of_a_pot_that_is_filled(keep: int, fresh: int, room: int) -> None:
    size = BoundedCacheSize(keep + fresh + room, keep, room)
    length = 0
    for token in range(100):
        assert size.length(token) == length
        cooks = length == keep + fresh
        length = keep if cooks else length
        assert size.cooks(token) == cooks and size.place(token) == length
        assert size.ahead(token) == keep + fresh - length
        length += 1
