"""What travels is read back: indices, values, bits; and the compaction against a loop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from smelt.kernels.threshold_select import add_and_select, threshold_select
from smelt.train.gradients import bits, indices, values


@given(st.lists(st.integers(0, 5 * indices.BLOCK - 1), unique=True, max_size=40), st.booleans(), st.integers(0, 5))
def test_indices_come_back(places: list[int], in_blocks: bool, more: int) -> None:
    given_places = torch.tensor(sorted(places), dtype=torch.int64)
    blocks = 5 if in_blocks else 0
    data = indices.encode(given_places, len(places) + more, blocks)
    assert len(data) == (len(places) + more) * indices.width(blocks)
    found = indices.decode(data, len(places), indices.block_counts(given_places, blocks))
    assert torch.equal(found, given_places)


def test_blocks_are_used_where_they_are_smaller() -> None:
    assert indices.blocks_of(10 * indices.BLOCK, 21) == 10
    assert indices.blocks_of(10 * indices.BLOCK, 20) == 0


@given(st.integers(0, 600), st.sampled_from(values.VALUES), st.floats(-30, 30))
def test_values_come_back_within_their_rounding(count: int, code: str, exponent: float) -> None:
    given_values = torch.randn(count) * 2.0**exponent
    data = values.encode(given_values, code)
    assert len(data) == values.size_of(count, code)
    found = values.decode(data, count, code)
    if code == "float32":
        assert torch.equal(found, given_values)
    elif code == "bfloat16":
        assert ((found - given_values).abs() <= given_values.abs() / 256).all()
    elif code == "float16":
        limited = given_values.clamp(-65504, 65504)
        assert ((found - limited).abs() <= limited.abs() / 2048 + 2.0**-25).all()
    elif count:
        assert (found - given_values).abs().max() <= given_values.abs().max() / 253


@given(st.lists(st.booleans(), max_size=40))
def test_bits_come_back(flags: list[bool]) -> None:
    packed = bits.pack(torch.tensor(flags, dtype=torch.bool))
    assert len(packed) == bits.size_of(len(flags))
    assert bits.unpack(packed, len(flags)).tolist() == flags


@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from([0.0, 0.5, 1.0, float("inf")]), st.integers(0, 12))
def test_compaction_is_what_a_loop_finds(one: int, other: int, threshold: float, slots: int) -> None:
    start, stop = sorted((one, other))
    residual, gradient = torch.randn(30), torch.randn(30)
    expected = residual + gradient
    places = [place for place in range(start, stop) if abs(expected[place]) >= threshold]
    copy = residual.clone()
    assert add_and_select(copy, gradient, threshold, start, stop).tolist() == places
    assert torch.equal(copy, expected)
    filled = [*places, *[30] * slots][:slots]
    assert add_and_select(residual, gradient, threshold, start, stop, slots).tolist() == filled


def test_compaction_of_many_chunks() -> None:
    """Also with a last chunk that is no multiple of eight, and with all or nothing selected."""
    residual = torch.zeros(200_001)
    gradient = torch.randn(200_001)
    found = add_and_select(residual, gradient, 2.0, 7, 190_000)
    assert torch.equal(found, torch.nonzero(gradient[7:190_000].abs() >= 2.0).flatten() + 7)
    assert torch.equal(threshold_select(residual, 0.0, 3, 150_000), torch.arange(3, 150_000))
    assert not len(threshold_select(residual, 100.0, 3, 150_000))
