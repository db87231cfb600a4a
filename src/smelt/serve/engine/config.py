"""Settings of an engine: plain data that can cross a process boundary, checked before any weight is read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from smelt.errors import ConfigError, ModelError, RequestError
from smelt.kvcache.eviction.policy import EvictionPolicy
from smelt.kvcache.eviction.prefill import check_evictable, find_kv_shape
from smelt.kvcache.eviction.profile import EvictionProfile
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.kvcache.selection.page_cache import OffloadConfig
from smelt.kvcache.streaming.config import BoundedCacheConfig
from smelt.models.model import Model
from smelt.serve.engine.expert_cache import EXPERT_POLICIES
from smelt.serve.engine.kv_dtype import check_kv_cache_dtype
from smelt.serve.engine.sampling_params import SamplingParams

T = TypeVar("T")
UNBOUNDED = 2**30  # max_model_len under a token cap: longer than any text
DEFAULT_MAX_MODEL_LEN = 8192
_RENAMED = {  # accepted for one version
    "context": "max_model_len", "cache_bytes": "kv_cache_bytes", "block": "block_size", "chunk": "prefill_chunk_size",
    "batch_tokens": "max_num_batched_tokens", "batch_requests": "max_num_seqs", "queue": "max_queued",
    "devices": "tensor_parallel_size", "kv": "kv_profile", "select": "page_selection", "residence": "kv_offload",
    "cap": "kv_token_cap", "kv_type": "kv_cache_dtype", "prefix_cache": "enable_prefix_caching",
}  # fmt: skip


@dataclass(frozen=True)
class KVCacheConfig:
    """How the KV cache is stored, and which of its tokens stay: at most one of `kv_profile`, `page_selection` and
    `kv_token_cap`."""

    block_size: int = 16  # tokens per block; with page_selection its page_size is used
    kv_cache_bytes: int | None = None  # by default a share of the free memory
    kv_cache_dtype: str | None = None  # model, int8, fp8, int4, int3; by default what the model was compressed for
    enable_prefix_caching: bool = True
    kv_min_tokens: int = 512  # that every head keeps under a kv_profile: shorter prompts stay complete
    kv_profile: EvictionPolicy | EvictionProfile | str | Path | None = None  # per-head eviction: `smelt kv profile`
    page_selection: SparseAttentionConfig | None = None  # sparse page attention; nothing is evicted
    kv_offload: OffloadConfig | None = None  # with page_selection: pages in host memory
    kv_token_cap: BoundedCacheConfig | None = None  # max cached tokens per request, however long its text

    def __post_init__(self) -> None:
        _check_positive(self, "block_size", "kv_cache_bytes")
        if self.kv_min_tokens < 0:
            raise ConfigError(f"kv_min_tokens is {self.kv_min_tokens:,}; it must not be negative.")
        check_kv_cache_dtype(self.kv_cache_dtype)
        policies = ("kv_profile", "page_selection", "kv_token_cap")
        chosen = [name for name in policies if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} exclude each other; give one of them, not both.")
        if self.kv_offload is not None and self.page_selection is None:
            raise ConfigError("kv_offload keeps pages that are not selected in host memory; give page_selection, too.")

    @property
    def explicit_dtype(self) -> str | None:
        """Return the KV cache dtype that the settings ask for; None if that is the model's own."""
        return None if self.kv_cache_dtype == "model" else self.kv_cache_dtype

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Refuse what a KV cache without all tokens cannot give."""
        if sampling.prompt_logprobs is not None and (self.kv_profile or self.kv_token_cap) is not None:
            raise RequestError(
                "log-probabilities of a prompt need a complete KV cache; run without an eviction profile or token cap."
            )

    @property
    def tokens_per_block(self) -> int:
        return self.block_size if self.page_selection is None else self.page_selection.page_size


@dataclass(frozen=True)
class EngineConfig:
    """One engine. `from_fields` also takes the fields of `KVCacheConfig`."""

    device: str = "cpu"
    max_model_len: int | None = None  # prompt and output tokens; by default the model's own, at most 8192
    max_num_batched_tokens: int = 2048  # per step
    max_num_seqs: int = 256  # per step
    prefill_chunk_size: int | None = None  # tokens of one prompt per step; by default max_num_batched_tokens
    target_step_seconds: float = 0.2  # on CPU: prompts are read in chunks that take about this long if answers wait
    max_queued: int = 4096
    adapters: Mapping[str, str | Path] = field(default_factory=dict)  # LoRA adapters by name: folders in PEFT's format
    max_loras: int | None = None  # room for adapters, also for those loaded later; by default for `adapters` only
    max_lora_rank: int | None = None  # of adapters; by default the largest of `adapters`
    tensor_parallel_size: int = 1
    compiled: bool = True  # False: run the network eagerly even where a compiled path exists
    expert_slots: int | None = None  # carved experts on the device at a time; the others are loaded from host memory
    expert_policy: str = "belady"  # of eviction: belady, lru or random
    expert_prefetch: bool = True  # load the experts of a step ahead of its layers; False: when a layer needs them
    expert_batching: bool = True  # compute tokens of the same carved experts together
    lm_head_dtype: str | None = None  # int8: quantize the LM head at load, per row; by default as the model has it
    activation_dtype: str | None = None  # int8: quantize the inputs of 4- and 8-bit layers, per token, at every step
    kv_cache: KVCacheConfig = field(default_factory=KVCacheConfig)

    def __post_init__(self) -> None:
        _check_positive(
            self, "max_num_batched_tokens", "max_num_seqs", "prefill_chunk_size", "max_queued", "tensor_parallel_size",
            "max_loras", "max_lora_rank", "expert_slots",
        )  # fmt: skip
        if self.expert_policy not in EXPERT_POLICIES:
            raise ConfigError(
                f"there is no expert policy {self.expert_policy!r}; there are {', '.join(EXPERT_POLICIES)}."
            )
        if not self.target_step_seconds > 0:
            raise ConfigError(f"target_step_seconds is {self.target_step_seconds:g}; it must be positive.")
        if self.lm_head_dtype not in (None, "int8"):
            raise ConfigError(f"there is no LM head dtype {self.lm_head_dtype!r}; there is int8.")
        if self.activation_dtype not in (None, "int8"):
            raise ConfigError(f"there is no activation dtype {self.activation_dtype!r}; there is int8.")
        if self.tensor_parallel_size > 1:
            cache = self.kv_cache
            if self.activation_dtype is not None:
                raise ModelError("activations are not quantized at load on several devices yet: use one.")
            if self.lm_head_dtype is not None:
                raise ModelError("a quantized LM head is not split over several devices yet: use one.")
            if cache.kv_profile is not None:
                raise ModelError("a per-head KV cache is not split over several devices yet: use one.")
            if cache.page_selection is not None:
                raise ModelError("sparse page attention does not run on several devices yet: use one.")
            if cache.kv_token_cap is not None:
                raise ModelError("a token cap is not kept on several devices yet: use one.")

    @classmethod
    def from_fields(cls, **values: Any) -> EngineConfig:
        """Build a config from fields of this class and of `KVCacheConfig`, which may be plain mappings."""
        values = {_current_name(name): value for name, value in values.items()}
        cache_names = {cache_field.name for cache_field in fields(KVCacheConfig)}
        own = {name: value for name, value in values.items() if name not in cache_names and value is not None}
        cache = {name: value for name, value in values.items() if name in cache_names and value is not None}
        for name, config_type in (("page_selection", SparseAttentionConfig), ("kv_offload", OffloadConfig)):
            if name in cache:
                cache[name] = _build(config_type, cache[name])
        if isinstance(cache.get("kv_token_cap"), int):
            cache["kv_token_cap"] = BoundedCacheConfig(cache["kv_token_cap"])
        if cache or "kv_cache" not in own:
            own["kv_cache"] = KVCacheConfig(**cache)
        return cls(**own)

    def resolve_max_model_len(self, model: Model) -> int:
        """Check `max_model_len` against the model's positions; under a token cap positions never run out."""
        length = self.max_model_len
        if self.kv_cache.kv_token_cap is not None:
            if length is not None and length < 2:
                raise RequestError(f"max_model_len {length:,} fits no prompt and output; give at least 2.")
            return UNBOUNDED if length is None else length
        positions = (
            getattr(model.network.config.get_text_config(), "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN
        )
        if length is None:
            return min(int(positions), DEFAULT_MAX_MODEL_LEN)
        if not 2 <= length <= positions:
            raise RequestError(f"max_model_len {length:,} is not possible; the model has {positions:,} positions.")
        return length

    def check(self, model: Model) -> None:
        """Refuse what this model cannot do; its weights may still be on the meta device."""
        if model.task != "language":
            raise ModelError(f"{model.source or 'this model'} is no language model: it cannot generate text.")
        self.resolve_max_model_len(model)
        if self.kv_cache.kv_profile is not None:
            eviction_policy(model, self.kv_cache)


def eviction_policy(model: Model, cache: KVCacheConfig) -> EvictionPolicy:
    """Read `kv_profile`, which may be a file, and check that it was made for this model."""
    profile = cache.kv_profile
    check_evictable(model)
    if isinstance(profile, EvictionPolicy):
        return profile
    assert profile is not None
    profile = profile if isinstance(profile, EvictionProfile) else EvictionProfile.load(Path(profile))
    profile.check_model(find_kv_shape(model))
    return EvictionPolicy.from_profile(profile, cache.tokens_per_block, cache.kv_min_tokens)


def _check_positive(config: EngineConfig | KVCacheConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value:,}; it must be at least 1.")


def _build(config_type: type[T], value: T | Mapping[str, Any]) -> T:
    return config_type(**value) if isinstance(value, Mapping) else value


def _current_name(name: str) -> str:
    names = [config_field.name for config_field in (*fields(EngineConfig), *fields(KVCacheConfig))]
    if name in names:
        return name
    if name in _RENAMED:
        warnings.warn(f"Engine({name}=...) is now Engine({_RENAMED[name]}=...).", FutureWarning, stacklevel=4)
        return _RENAMED[name]
    near = get_close_matches(name, names, 1)
    raise TypeError(f"Engine has no option {name!r}" + (f"; did you mean {near[0]!r}?" if near else "."))
