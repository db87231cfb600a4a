"""The bounded KV cache: where tokens are stored, what is evicted, and that it never grows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from smelt.errors import ModelError, ResourceError
from smelt.kvcache.streaming.bounded_cache import BoundedCache, topk_in_order
from tests.tiny import BUILDS

HEADS, CAP, WIDTH, LAYERS = 2, 10, 8, 3


def filled(tokens: int, with_token_scores: bool = False) -> tuple[BoundedCache, Tensor]:
    """Return a cache after this many random tokens, and their keys [layers, 1, heads, tokens, head_dim]; values are
    keys + 1.
    """
    cache = BoundedCache(CAP, BUILDS["llama"]().config, with_token_scores)
    keys = torch.randn(LAYERS, 1, HEADS, tokens, WIDTH)
    for layer in range(LAYERS):
        cache.update(keys[layer], keys[layer] + 1, layer)
    return cache, keys


def everything(cache: BoundedCache) -> list[Tensor]:
    """Copy all tensors of the cache, free slots included."""
    return [tensor.clone() for layer in cache.layers for tensor in layer.tensors()]


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_tokens_are_stored_in_order_of_arrival() -> None:
    cache, keys = filled(4)
    more = torch.randn(1, HEADS, 3, WIDTH)
    stored, values = cache.update(more, more + 1, 0)
    assert torch.equal(stored, torch.cat((keys[0], more), dim=2)) and torch.equal(values, stored + 1)
    assert cache.layers[0].token_indices[:, :7].tolist() == [list(range(7))] * HEADS
    assert cache.get_seq_length() == cache.length == 7 and cache.num_seen == 7


@pytest.mark.parametrize("first", [0, 2])
def test_each_head_keeps_its_own_tokens_after_the_prefix(first: int) -> None:
    cache, keys = filled(9, with_token_scores=True)
    for layer in cache.layers:
        layer.token_scores[:, :9] = layer.token_indices[:, :9] * 10.0
    kept = torch.tensor([[0, 3, 4], [1, 2, 5]])
    for layer in range(LAYERS):
        cache.retain(layer, kept, first)
    assert cache.length == first + 3 and cache.num_seen == 9
    for layer, layer_cache in enumerate(cache.layers):
        for head in range(HEADS):
            expected = [*range(first), *(first + int(slot) for slot in kept[head])]
            assert layer_cache.token_indices[head, : cache.length].tolist() == expected
            assert layer_cache.token_scores[head, : cache.length].tolist() == [number * 10.0 for number in expected]
            assert torch.equal(layer_cache.keys[head, : cache.length], keys[layer, 0, head, expected])
            assert torch.equal(layer_cache.values[head, : cache.length], keys[layer, 0, head, expected] + 1)
        assert all(not tensor[:, cache.length :].any() for tensor in layer_cache.tensors())  # the others are zeroed


def test_keys_are_rotated_when_they_move() -> None:
    """The rotation receives the old positions, and nothing else of the layer changes."""
    cache, keys = filled(9)
    indices = torch.tensor([[0, 3, 4], [1, 2, 5]])
    cache.retain(0, indices, 2, lambda kept, slots: kept + 100 * slots[..., None])
    for head in range(HEADS):
        slots = indices[head] + 2
        assert torch.equal(cache.layers[0].keys[head, 2:5], keys[0, 0, head, slots] + 100 * slots[:, None])
        assert torch.equal(cache.layers[0].values[head, 2:5], keys[0, 0, head, slots] + 1)
        assert torch.equal(cache.layers[0].keys[head, :2], keys[0, 0, head, :2])


def test_truncated_tokens_are_gone() -> None:
    cache, _ = filled(4)
    before = everything(cache)
    with pytest.raises(KeyboardInterrupt), cache.transaction():
        cache.update(torch.ones(1, HEADS, 2, WIDTH), torch.ones(1, HEADS, 2, WIDTH), 0)
        raise KeyboardInterrupt
    assert same(everything(cache), before) and {layer.length for layer in cache.layers} == {4}
    with cache.transaction():
        cache.update(torch.ones(1, HEADS, 2, WIDTH), torch.ones(1, HEADS, 2, WIDTH), 0)
    assert cache.length == 6


def test_temporary_tokens_leave_no_trace_even_after_an_error() -> None:
    cache, _ = filled(4)
    before = everything(cache)
    with cache.temporary():
        cache.update(torch.ones(1, HEADS, 2, WIDTH), torch.ones(1, HEADS, 2, WIDTH), 0)
    assert same(everything(cache), before)
    with pytest.raises(ZeroDivisionError), cache.temporary():
        cache.update(torch.ones(1, HEADS, 2, WIDTH), torch.ones(1, HEADS, 2, WIDTH), 1)
        raise ZeroDivisionError
    assert same(everything(cache), before) and {layer.length for layer in cache.layers} == {4}


def test_num_bytes_counts_its_tensors() -> None:
    slots = LAYERS * HEADS * CAP
    assert filled(1)[0].nbytes == filled(9)[0].nbytes == slots * (2 * WIDTH * 4 + 8)
    assert filled(1, with_token_scores=True)[0].nbytes == slots * (2 * WIDTH * 4 + 8 + 4)


def test_it_never_exceeds_its_capacity() -> None:
    cache, _ = filled(CAP)
    with pytest.raises(ResourceError, match=r"holds 10 tokens; 11"):
        cache.update(torch.ones(1, HEADS, 1, WIDTH), torch.ones(1, HEADS, 1, WIDTH), 0)


def test_sliding_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="sliding"):
        BoundedCache(CAP, BUILDS["mistral"]().config)


def test_topk_in_order() -> None:
    scores = torch.tensor([[1.0, 5.0, 2.0, 5.0, torch.inf], [3.0, 3.0, 3.0, 0.0, 3.0]])
    assert topk_in_order(scores, 3).tolist() == [[1, 3, 4], [0, 1, 2]]
