"""Quantized KV cache during generation, as in QuaRot (Ashkboos et al., 2024).

The paper rotates queries and keys before keys are quantized; rotating keys only, and back when they are read, gives the
same products. Values are rotated in the same way. Weights are unchanged: the model records the format of its KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from smelt.compression.base import METHODS, Method, MethodContext
from smelt.config import renamed
from smelt.errors import FormatError, ModelError, RecipeError
from smelt.models.anatomy import Anatomy
from smelt.models.kv_cache import UNPACKED, KVCacheFormat
from smelt.models.model import Model


@METHODS.register("kv-cache", paper="Ashkboos et al., 2024 (QuaRot's cache, arXiv 2404.00456)")
@dataclass(frozen=True)
class KvCache(Method):
    """Use for long contexts: quantizes the KV cache of a language model and leaves its weights unchanged."""

    offloads: ClassVar[bool] = True
    format: str = "int4-asym/128@float16"  # of the KV cache: a name from `smelt formats`, or none
    value_format: str | None = renamed("values", default=None)  # of values, if different from keys
    clip_ratio: float = renamed("clip", default=1.0)  # fraction of a group's range that its grid covers
    rotate_keys: bool = True  # Hadamard-rotate keys before quantization, and back when they are read
    rotate_values: bool = True  # the same for values

    def __post_init__(self) -> None:
        try:
            self.kv.check()
        except FormatError as error:
            raise RecipeError(f"{self.name}: {error}") from error

    @property
    def kv(self) -> KVCacheFormat:
        return KVCacheFormat(
            self.format, self.value_format, float(self.clip_ratio), self.rotate_keys, self.rotate_values
        )

    def check(self, anatomy: Anatomy) -> None:
        if not anatomy.family.causal or not anatomy.network.can_generate():
            raise ModelError(f"{self.name} is for models that generate text: this one has no KV cache.")
        self.kv.cache(anatomy.network.config)

    def apply(self, model: Model, context: MethodContext) -> dict[str, Any]:
        self.check(model.anatomy)
        before = model.kv or KVCacheFormat()
        model.kv = None if str(self.kv) == UNPACKED else self.kv
        return {
            f"kv_cache_bits_per_token_{when}": sum(
                part.units * kv.bits(part.head_dim, model.network.dtype)
                for part in model.anatomy.parts
                if part.kind == "heads"
            )
            for when, kv in (("before", before), ("after", self.kv))
        }
