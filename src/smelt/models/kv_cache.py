"""Quantized KV cache: keys and values are packed in a number format and dequantized when attention reads them.

Each head's vector of a token is a row with its own group scales, so the cache can grow token by token and reorder beams
without requantizing. K and V can be rotated by a Hadamard matrix before quantization and back after
dequantization: for keys, QuaRot's rotation of queries and keys after RoPE (Ashkboos et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from smelt.errors import FormatError, ModelError
from smelt.kernels.hadamard import hadamard_order, hadamard_transform
from smelt.numerics.catalog import get_format
from smelt.numerics.format import PER_ROW, PER_TENSOR, Format, QuantizedTensor

UNPACKED = "none"  # no format: stored in the network's dtype
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


class PackedRows:
    """A growing tensor [batch, heads, tokens, head_dim], quantized row by row; unquantized if the format is None."""

    def __init__(self, number_format: Format | None, clip: float, rotate: bool) -> None:
        self.format, self.clip, self.rotate = number_format, clip, rotate
        self.tensors: dict[str, Tensor] = {}  # all [batch, heads, tokens, ...]
        self.head_dim, self.dtype = 0, torch.float32

    def append(self, x: Tensor) -> None:
        self.head_dim, self.dtype = x.shape[-1], x.dtype
        new = self._quantize(x)
        self.tensors = {
            name: torch.cat((self.tensors[name], tensor), dim=2) if self.tensors else tensor
            for name, tensor in new.items()
        }

    def _quantize(self, x: Tensor) -> dict[str, Tensor]:
        if self.format is None:
            return {"values": x}
        x = hadamard_transform(x) if self._rotates else x
        grouped = self.format.split_groups(x)
        qparams = self.format.compute_qparams(grouped, clip_ratio=self.clip, tensor_amax=self.format.tensor_amax(x))
        codes = self.format.quantize_groups(grouped, qparams).flatten(-2)[..., : self.head_dim]
        rows = (*x.shape[:3], 1, 1)
        return {  # store per-tensor values with every row, since later tokens have their own
            name: tensor.expand(rows) if name == "tensor" else tensor
            for name, tensor in QuantizedTensor(self.format, codes, qparams).pack().items()
        }

    def values(self) -> Tensor:  # [batch, heads, tokens, head_dim]
        if self.format is None:
            return self.tensors["values"]
        x = QuantizedTensor.from_packed(self.format, self.tensors, self.head_dim).dequantize()
        return (hadamard_transform(x, inverse=True) if self._rotates else x).to(self.dtype)

    @property
    def _rotates(self) -> bool:
        return self.rotate and hadamard_order(self.head_dim) is not None

    @property
    def tokens(self) -> int:
        return next(iter(self.tensors.values())).shape[2] if self.tensors else 0

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Apply `function` to every tensor, codes and scales alike."""
        self.tensors = {name: function(tensor) for name, tensor in self.tensors.items()}


class PackedLayer(DynamicLayer):
    """One layer of the cache. Only the packed rows persist between calls of `update`."""

    def __init__(self, rows: Callable[[bool], PackedRows]) -> None:
        super().__init__()
        self.new_rows = rows
        self.rows = (rows(True), rows(False))  # keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.rows
        keys.append(key_states)
        values.append(value_states)
        return keys.values(), values.values()

    def get_seq_length(self) -> int:
        return self.rows[0].tokens

    def reset(self) -> None:
        self.rows = (self.new_rows(True), self.new_rows(False))
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError("the number of tokens to remove must be negative or 0")
        if tokens_to_remove:
            self._map_tensors(lambda tensor: tensor[:, :, :tokens_to_remove].contiguous())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_tensors(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_tensors(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_tensors(lambda tensor: tensor[indices])

    def offload(self) -> None:
        self._map_tensors(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._map_tensors(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _map_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        for rows in self.rows:
            rows.map_tensors(function)


class QuantizedKVCache(Cache):
    """A quantized KV cache to pass to a network as `past_key_values`; create one per sequence or batch.

    `number_format` is a name from `smelt formats` (or `none`) for keys and, unless `values` is set, for values.
    `clip` is the fraction of a group's range that its grid covers. All layers keep every token, including layers with
    sliding-window attention.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        number_format: str | Format,
        values: str | Format | None = None,
        *,
        clip: float = 1.0,
        rotate_keys: bool = False,
        rotate_values: bool = False,
    ) -> None:
        formats = {True: _row_format(number_format), False: _row_format(values or number_format)}
        text = config.get_text_config(decoder=True)
        unknown = set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYER_TYPES
        if unknown:
            raise ModelError(
                f"a quantized KV cache needs attention layers; this network has {', '.join(sorted(unknown))}."
            )
        _check_clip(clip)

        def rows(keys: bool) -> PackedRows:
            return PackedRows(formats[keys], clip, rotate_keys if keys else rotate_values)

        super().__init__(layers=[PackedLayer(rows) for _ in range(text.num_hidden_layers)])

    @property
    def nbytes(self) -> int:
        """The size of all layers in bytes."""
        return sum(rows.nbytes for layer in self.layers for rows in layer.rows)


@dataclass(frozen=True)
class KVCacheFormat:
    """The KV cache format saved with a model: the number formats of keys and values, and how both are quantized."""

    format: str = UNPACKED
    values: str | None = None  # if it differs from that of the keys
    clip: float = 1.0
    rotate_keys: bool = False
    rotate_values: bool = False

    def cache(self, config: PreTrainedConfig) -> QuantizedKVCache:
        """Create an empty cache."""
        rotation = {"rotate_keys": self.rotate_keys, "rotate_values": self.rotate_values}
        return QuantizedKVCache(config, self.format, self.values, clip=self.clip, **rotation)

    def check(self) -> None:
        """Raise if no cache can be created with these settings."""
        for name in (self.format, self.values):
            _row_format(name or UNPACKED)
        _check_clip(self.clip)

    def bits(self, head_dim: int, dtype: torch.dtype) -> float:
        """Return the bits per token and head, key and value together."""
        formats = [_row_format(name) for name in (self.format, self.values or self.format)]
        return head_dim * sum(8 * dtype.itemsize if f is None else f.bits_per_value(head_dim) for f in formats)

    def __str__(self) -> str:
        return self.format if self.values in (None, self.format) else f"{self.format} and {self.values}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Any, where: str) -> KVCacheFormat:
        """Parse an untrusted description; raise unless it has the form that `to_json` writes."""
        known = {"format": (str,), "values": (str, type(None)), "clip": (float,)}
        known |= {"rotate_keys": (bool,), "rotate_values": (bool,)}
        if not isinstance(plain, dict) or any(type(value) not in known.get(key, ()) for key, value in plain.items()):
            raise ModelError(f"{where}: this does not describe a KV cache format: {plain!r:.80}.")
        kv_format = cls(**plain)
        try:
            kv_format.check()
        except FormatError as error:
            raise ModelError(f"{where}: {error}") from error
        return kv_format


def _check_clip(clip: float) -> None:
    if not 0 < clip <= 1:
        raise FormatError(f"the clip ratio of a KV cache must be between 0 and 1, not {clip}.")


def _row_format(name_or_format: str | Format) -> Format | None:
    """Return the format of a row; per-tensor scales become per-row scales, since the tensor is still growing."""
    if name_or_format == UNPACKED:
        return None
    number_format = get_format(name_or_format) if isinstance(name_or_format, str) else name_or_format
    return replace(number_format, group_size=PER_ROW) if number_format.group_size == PER_TENSOR else number_format
