"""Devices run the operator's real arithmetic, and more work takes longer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from smelt.errors import ResourceError
from smelt.targets.device import Device, _block, _RandomPool
from smelt.targets.operators import AttentionOp, FeedForwardOp, Operator

OPERATORS: list[Operator] = [
    AttentionOp(hidden=24, heads=3, kv_heads=3, head_dim=8, tokens=5, batch=2),
    AttentionOp(hidden=20, heads=6, kv_heads=2, head_dim=5, tokens=7, causal=True),
    FeedForwardOp(hidden=24, ffn_channels=17, gated=False, tokens=5, batch=2),
    FeedForwardOp(hidden=20, ffn_channels=1, gated=True, tokens=3),
]


def attention_by_hand(operator: AttentionOp, pool: _RandomPool) -> torch.Tensor:
    hidden, dim, group = operator.hidden, operator.head_dim, operator.heads // operator.kv_heads
    states = pool.allocate(operator.batch, operator.tokens, hidden)
    query = pool.allocate(operator.heads, dim, hidden)
    key, value = (pool.allocate(operator.kv_heads, dim, hidden).repeat_interleave(group, dim=0) for _ in range(2))
    output, scale, shift = pool.allocate(hidden, operator.heads, dim), pool.allocate(hidden), pool.allocate(hidden)
    queries, keys, values = (torch.einsum("btd,hed->bhte", states, weight) for weight in (query, key, value))
    scores = queries @ keys.transpose(-1, -2) / dim**0.5  # [batch, heads, tokens, tokens]
    if operator.causal:
        future = torch.ones(operator.tokens, operator.tokens).triu(1).bool()
        scores = scores.masked_fill(future, -torch.inf)
    context = scores.softmax(-1) @ values  # [batch, heads, tokens, head_dim]
    result = states + torch.einsum("bhte,dhe->btd", context, output)
    return torch.layer_norm(result, (hidden,), scale, shift)


@pytest.mark.parametrize("operator", OPERATORS[:2])
def test_attention_block_is_attention(operator: AttentionOp) -> None:
    pool = _RandomPool("cpu", seed=0)
    pool.start(operator)
    result = _block(operator, pool)()
    pool.start(operator)
    torch.testing.assert_close(result, attention_by_hand(operator, pool))


@pytest.mark.parametrize("operator", OPERATORS)
def test_tensors_of_a_block_do_not_share_memory(operator: Operator) -> None:
    stretches: list[tuple[int, int]] = []
    pool = _RandomPool("cpu", seed=0)
    allocate = pool.allocate

    def noted(*shape: int) -> torch.Tensor:
        tensor = allocate(*shape)
        stretches.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
        return tensor

    pool.allocate = noted  # type: ignore[method-assign]
    pool.start(operator)
    _block(operator, pool)
    stretches.sort()
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(stretches))
    weights_and_rest = operator.parameters() + operator.hidden * (operator.batch * operator.tokens + 2)
    assert sum(end - start for start, end in stretches) == 4 * weights_and_rest


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_takes_time(operator: Operator) -> None:
    assert 0 < Device("cpu").latency(operator) < 1


def test_zero_units_take_no_time() -> None:
    assert Device("cpu").latency(FeedForwardOp(hidden=8, ffn_channels=0, gated=False, tokens=4)) == 0.0
    assert Device("cpu").latency(AttentionOp(hidden=8, heads=0, kv_heads=0, head_dim=4, tokens=4)) == 0.0


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, threads waiting for each other would dominate the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_channels_take_longer_in_every_dtype(dtype: str) -> None:
    device = Device("cpu", repeats=5)
    narrow, many = (
        FeedForwardOp(hidden=256, ffn_channels=count, gated=True, tokens=64, dtype=dtype) for count in (32, 4096)
    )
    assert min(device.latency(many) for _ in range(3)) > 3 * min(device.latency(narrow) for _ in range(6))


def test_fits_checks_free_memory() -> None:
    assert Device("cpu").fits(1000) and not Device("cpu").fits(2**60)


def test_unknown_device_raises_one_sentence() -> None:
    with pytest.raises(ResourceError, match="cpu or cuda"):
        Device("abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_missing_cuda_raises_one_sentence() -> None:
    with pytest.raises(ResourceError, match="no CUDA device"):
        Device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_takes_time_on_a_gpu(operator: Operator) -> None:
    device = Device("cuda")
    assert 0 < device.latency(operator) < 1
    assert device.fits(1000) and not device.fits(2**60) and device.name.startswith(torch.cuda.get_device_name(0))
