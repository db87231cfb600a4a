"""Index, value and bit encodings round-trip; compaction matches a loop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from smelt.kernels.threshold_select import add_and_select, threshold_select
from smelt.train.gradients import encoding
from smelt.train.gradients.comm import Comm
from tests.train.parallel import run


@given(
    st.lists(st.integers(0, 5 * encoding.INDEX_BLOCK - 1), unique=True, max_size=40), st.booleans(), st.integers(0, 5)
)
def test_indices_round_trip(positions: list[int], in_blocks: bool, padding: int) -> None:
    indices = torch.tensor(sorted(positions), dtype=torch.int64)
    blocks = 5 if in_blocks else 0
    data = encoding.encode_indices(indices, len(indices) + padding, blocks)
    assert len(data) == (len(indices) + padding) * encoding.index_width(blocks)
    decoded = encoding.decode_indices(data, len(indices), encoding.count_per_block(indices, blocks))
    assert torch.equal(decoded, indices)


def test_block_encoding_is_used_where_it_is_smaller() -> None:
    assert encoding.num_index_blocks(10 * encoding.INDEX_BLOCK, 21) == 10
    assert encoding.num_index_blocks(10 * encoding.INDEX_BLOCK, 20) == 0


@given(st.integers(0, 600), st.sampled_from(encoding.WIRE_DTYPES), st.floats(-30, 30))
def test_values_round_trip_within_rounding(count: int, wire_dtype: str, exponent: float) -> None:
    values = torch.randn(count) * 2.0**exponent
    data = encoding.encode_values(values, wire_dtype)
    assert len(data) == encoding.encoded_size(count, wire_dtype)
    decoded = encoding.decode_values(data, count, wire_dtype)
    if wire_dtype == "float32":
        assert torch.equal(decoded, values)
    elif wire_dtype == "bfloat16":
        assert ((decoded - values).abs() <= values.abs() / 256).all()
    elif wire_dtype == "float16":
        clamped = values.clamp(-65504, 65504)
        assert ((decoded - clamped).abs() <= clamped.abs() / 2048 + 2.0**-25).all()
    elif count:
        assert (decoded - values).abs().max() <= values.abs().max() / 253


@given(st.lists(st.booleans(), max_size=40))
def test_bits_round_trip(flags: list[bool]) -> None:
    packed = encoding.pack_bits(torch.tensor(flags, dtype=torch.bool))
    assert len(packed) == encoding.packed_size(len(flags))
    assert encoding.unpack_bits(packed, len(flags)).tolist() == flags


@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from([0.0, 0.5, 1.0, float("inf")]), st.integers(0, 12))
def test_compaction_equals_a_loop(one: int, other: int, threshold: float, capacity: int) -> None:
    start, stop = sorted((one, other))
    residual, gradient = torch.randn(30), torch.randn(30)
    expected = residual + gradient
    indices = [index for index in range(start, stop) if abs(expected[index]) >= threshold]
    copy = residual.clone()
    assert add_and_select(copy, gradient, threshold, start, stop).tolist() == indices
    assert torch.equal(copy, expected)
    padded = [*indices, *[30] * capacity][:capacity]
    assert add_and_select(residual, gradient, threshold, start, stop, capacity).tolist() == padded


def test_compaction_of_many_chunks() -> None:
    """Also with a last chunk that is not a multiple of eight, and with all or nothing selected."""
    residual = torch.zeros(200_001)
    gradient = torch.randn(200_001)
    indices = add_and_select(residual, gradient, 2.0, 7, 190_000)
    assert torch.equal(indices, torch.nonzero(gradient[7:190_000].abs() >= 2.0).flatten() + 7)
    assert torch.equal(threshold_select(residual, 0.0, 3, 150_000), torch.arange(3, 150_000))
    assert not len(threshold_select(residual, 100.0, 3, 150_000))


def summed(count: int) -> tuple[torch.Tensor, int]:
    comm = Comm()
    values, _ = encoding.all_reduce_values(torch.arange(count) + float(comm.rank), comm, "bfloat16")
    return values, comm.bytes_received["values"]


def test_rounded_values_are_summed_in_equal_chunks() -> None:
    """Two ranks receive each other's half of 6 padded values, then the sum of the other half: 2 x 3 x 2 bytes."""
    for values, received in run(2, summed, 5):
        assert values.tolist() == [1, 3, 5, 7, 9] and received == 12
