"""Random bit flips in the KV cache, in the format in which it is stored.

Every stored bit of a new key or value row flips with the bit error rate before attention first reads the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from smelt.measure.robustness.bit_flips import check_ber, distinct_positions, flip
from smelt.models.kv_cache import KVCacheFormat, PackedRows, QuantizedKVCache


class BitErrors:
    """A source of bit errors that counts them."""

    def __init__(self, ber: float, seed: int) -> None:
        check_ber(ber)
        self.ber, self.flips, self.bits = ber, 0, 0
        self._generator = np.random.default_rng(seed)

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the tensor with each bit flipped at the bit error rate; the same object if none is."""
        bits = 8 * tensor.numel() * tensor.element_size()
        count = int(self._generator.binomial(bits, self.ber))
        self.bits += bits
        self.flips += count
        return flip(tensor, distinct_positions(bits, count, self._generator)) if count else tensor


class FaultyRows(PackedRows):
    """Packed rows of a KV cache whose stored bits flip when they are written."""

    def __init__(self, rows: PackedRows, errors: BitErrors) -> None:
        super().__init__(rows.format, rows.clip, rows.rotate)
        self.errors = errors

    def _quantize(self, x: Tensor) -> dict[str, Tensor]:
        # Per-tensor values are views of one value for all rows: a copy per row is what a cache stores.
        return {name: self.errors.apply(tensor.contiguous()) for name, tensor in super()._quantize(x).items()}


@dataclass(frozen=True)
class FaultyKVCacheFormat(KVCacheFormat):
    """A KV cache format whose caches have bit errors. Use it as `kv` of a model."""

    errors: BitErrors = field(default_factory=lambda: BitErrors(0.0, 0))

    @classmethod
    def of(cls, kv_format: KVCacheFormat | None, errors: BitErrors) -> FaultyKVCacheFormat:
        """Add bit errors to a format; None is the network's own dtype."""
        plain = kv_format or KVCacheFormat()
        settings = {field.name: getattr(plain, field.name) for field in fields(KVCacheFormat)}
        return cls(**settings, errors=errors)

    def cache(self, config: PreTrainedConfig) -> QuantizedKVCache:
        cache = super().cache(config)
        for layer in cache.layers:
            layer.new_rows = _with_errors(layer.new_rows, self.errors)
            layer.reset()
        return cache

    def to_json(self) -> dict[str, Any]:
        raise TypeError("a KV cache with bit errors is a measurement and is not saved")


def _with_errors(new_rows: Callable[[bool], PackedRows], errors: BitErrors) -> Callable[[bool], PackedRows]:
    return lambda keys: FaultyRows(new_rows(keys), errors)
