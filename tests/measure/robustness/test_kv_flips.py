"""Bit errors in the KV cache: in what it stores, counted, and none at a rate of zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from smelt.errors import ConfigError
from smelt.measure.perplexity import perplexity
from smelt.measure.robustness.kv_flips import BitErrors, FaultyKVCacheFormat
from smelt.models.kv_cache import KVCacheFormat
from tests.tiny import BUILDS
from tests.trained import HELD_OUT, character_model


@pytest.mark.parametrize("kv", ["none", "int8", "int4", "fp8-e4m3", "nvfp4"])
def test_no_errors_change_nothing_and_all_bits_are_counted(kv: str) -> None:
    config = BUILDS["llama"]().config
    errors = BitErrors(0.0, 0)
    clean, faulty = KVCacheFormat(kv).cache(config), FaultyKVCacheFormat.of(KVCacheFormat(kv), errors).cache(config)
    torch.manual_seed(0)
    for tokens in (3, 1):
        keys, values = torch.randn(2, 2, tokens, 8), torch.randn(2, 2, tokens, 8)
        for expected, got in zip(clean.update(keys, values, 0), faulty.update(keys, values, 0), strict=True):
            assert torch.equal(expected, got)
    assert errors.flips == 0 and errors.bits == 8 * faulty.nbytes > 0


@pytest.mark.parametrize("kv", ["none", "int8", "int4-asym"])
def test_exactly_the_counted_bits_differ_in_the_stored_rows(kv: str) -> None:
    config = BUILDS["llama"]().config
    errors = BitErrors(0.02, 1)
    clean, faulty = KVCacheFormat(kv).cache(config), FaultyKVCacheFormat.of(KVCacheFormat(kv), errors).cache(config)
    keys, values = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    clean.update(keys, values, 0)
    faulty.update(keys, values, 0)
    before = [tensor for rows in clean.layers[0].rows for tensor in rows.tensors.values()]
    after = [tensor for rows in faulty.layers[0].rows for tensor in rows.tensors.values()]
    differing = sum(
        bin(first ^ second).count("1")
        for pair in zip(before, after, strict=True)
        for first, second in zip(*(each.contiguous().view(-1).view(torch.uint8).tolist() for each in pair), strict=True)
    )
    assert differing == errors.flips > 0
    stored = [tensor.clone() for tensor in after]
    faulty.update(keys[:, :, :1], values[:, :, :1], 0)
    again = [tensor for rows in faulty.layers[0].rows for tensor in rows.tensors.values()]
    for old, new in zip(stored, again, strict=True):  # a row is hit once, when it is written
        same = new[:, :, :5].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(same, old.contiguous().view(-1).view(torch.uint8))


def test_more_windows_are_damaged_at_higher_rates_and_in_floats() -> None:
    """A float row of 8 values has 8 fatal exponent bits; an int8 row has one, in its scale."""
    model = character_model()
    plain = {kv: perplexity(model, HELD_OUT, context=32, limit=640, kv=kv).items for kv in ("none", "int8")}

    def damaged(kv: str, ber: float) -> float:
        faulty = replace(model, kv=FaultyKVCacheFormat.of(KVCacheFormat(kv), BitErrors(ber, 0)))
        losses = perplexity(faulty, HELD_OUT, context=32, limit=640).items
        return float((~(losses <= plain[kv] + 0.01)).mean())

    assert damaged("int8", 0.0) == 0
    assert 0 < damaged("int8", 2e-4) < damaged("int8", 3e-3)
    assert damaged("int8", 2e-4) < damaged("none", 2e-4)


def test_rates_are_probabilities() -> None:
    with pytest.raises(ConfigError, match="between 0 and 1, not 2"):
        BitErrors(2.0, 0)


def test_it_is_never_saved() -> None:
    with pytest.raises(TypeError, match="not saved"):
        FaultyKVCacheFormat.of(None, BitErrors(0.1, 0)).to_json()
