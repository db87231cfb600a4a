"""Build an engine's scheduler, KV cache and runner: compiled on CPU, fused with CUDA graphs on a GPU, or eager."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from smelt.errors import ModelError, RequestError, ResourceError
from smelt.kvcache.eviction.policy import EvictionPolicy
from smelt.kvcache.eviction.prefill import check_evictable, find_kv_shape
from smelt.kvcache.selection.config import SparseAttentionConfig, sparse_attention_heads
from smelt.kvcache.streaming.config import BoundedCacheConfig
from smelt.kvcache.streaming.infinipot import InfiniPotCompressor
from smelt.measure.memory import free_memory
from smelt.models.carved_experts import carved_routes_of
from smelt.models.model import Model
from smelt.models.program_network import ProgramNetwork
from smelt.models.quantized import quantized_layers
from smelt.models.quantized_network import dequantize_without_kernel, quantize_activations, quantize_lm_head
from smelt.numerics.catalog import format_name, get_format
from smelt.progress import Progress
from smelt.runtime import decoder
from smelt.serve.engine.adapters import Adapters
from smelt.serve.engine.attention import block_bytes, kv_quant_format, row_bytes, unpaged_reason
from smelt.serve.engine.blocks import BlockPool
from smelt.serve.engine.bounded.cache_manager import BoundedCacheManager, BoundedCacheState
from smelt.serve.engine.bounded.pages import bounded_block_bytes
from smelt.serve.engine.bounded.runner import BoundedRunner
from smelt.serve.engine.config import EngineConfig, KVCacheConfig, eviction_policy
from smelt.serve.engine.expert_scheduler import ExpertScheduler
from smelt.serve.engine.gpu_pages import PagedGpuPages
from smelt.serve.engine.gpu_runner import GpuRunner
from smelt.serve.engine.kv_cache_manager import KVCacheManager, PagedCacheManager
from smelt.serve.engine.kv_dtype import resolve_kv_cache_dtype
from smelt.serve.engine.own_cache_runner import OwnCacheRunner
from smelt.serve.engine.per_head.cache import PerHeadCache, page_bytes
from smelt.serve.engine.per_head.cache_manager import PerHeadCacheManager
from smelt.serve.engine.per_head.gpu_pages import PerHeadGpuPages
from smelt.serve.engine.per_head.runner import PerHeadRunner
from smelt.serve.engine.routed_runner import RoutedGpuRunner, RoutedRunner, SlottedGpuRunner
from smelt.serve.engine.runner import InflightBatch, ModelRunner
from smelt.serve.engine.scheduler import ScheduledBatch, Scheduler
from smelt.serve.engine.sparse_runner import SparseRunner
from smelt.serve.engine.tensor_parallel import RunnerSizes, TensorParallelRunner

logger = logging.getLogger(__name__)
CACHE_SHARE = {"cpu": 0.3, "cuda": 0.8}  # of the free memory: the default size of the KV cache


class Runner(Protocol):
    """The interface of a runner."""

    max_inflight_steps: int  # steps launched before the previous one is read
    eos_token_ids: tuple[int, ...]

    @property
    def backend(self) -> str:
        """Return what computes a step."""

    def warmup(self, progress: Progress) -> None:
        """Compile and capture what would otherwise be made on first use."""

    def launch(self, batch: ScheduledBatch) -> InflightBatch: ...


@dataclass(frozen=True)
class _ResolvedConfig:
    """A model and the resolved settings of its engine."""

    model: Model
    config: EngineConfig
    adapters: Adapters
    max_model_len: int
    kv_cache_dtype: str | None

    @property
    def cache(self) -> KVCacheConfig:
        return self.config.kv_cache

    @property
    def block_size(self) -> int:
        return self.cache.tokens_per_block

    @property
    def blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def chunk_size(self) -> int:
        return self.config.prefill_chunk_size or self.config.max_num_batched_tokens

    @property
    def runs_fused(self) -> bool:
        return self.config.compiled and self.model.device.type == "cuda" and self.eager_reason is None

    @cached_property
    def eager_reason(self) -> str | None:
        """Why the network runs eagerly on a GPU."""
        if (reason := decoder.unsupported_reason(self.model, carved_experts=True)) is not None:
            return reason
        from smelt.runtime.gpu_experts import slots_reason, unsupported_reason  # needs Triton

        if self.config.expert_slots is not None and (reason := slots_reason(self.model)) is not None:
            return reason
        experts = [part for part in self.model.anatomy.parts if part.mixture is not None]
        projections = [projection for part in experts for projection in (*part.input_projections, part.output)]
        if self.adapters.layers.intersection(projection.path for projection in projections):
            return "an adapter changes its experts"
        return unsupported_reason(self.model)

    def num_blocks(self, block_bytes: int, max_blocks: int, device: torch.device, reserved_bytes: int = 0) -> int:
        """Return how many blocks fit into the memory for them, at most what all requests could use."""
        memory = self.cache.kv_cache_bytes
        if memory is None:
            memory = int(CACHE_SHARE[device.type] * free_memory(device))
        count = min((memory - reserved_bytes) // max(block_bytes, 1), max_blocks)
        if count < 1:
            beside = f", beside the {reserved_bytes:,} of a step's chunks" if reserved_bytes else ""
            needed = f"which takes {block_bytes:,}{beside}"
            raise RequestError(f"{memory:,} bytes hold no block of {self.block_size} tokens, {needed}; give more.")
        return int(count)

    def scheduler(self, cache_manager: KVCacheManager, max_num_batched_tokens: int | None = None) -> Scheduler:
        config = self.config
        return Scheduler(
            cache_manager, max_num_batched_tokens=max_num_batched_tokens or config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs, prefill_chunk_size=config.prefill_chunk_size
            if max_num_batched_tokens is None else self.chunk_size, max_queued=config.max_queued,
        )  # fmt: skip


def build(model: Model, config: EngineConfig, adapters: Adapters) -> tuple[Scheduler, Runner]:
    """Build the scheduler and the runner that the KV cache's policy asks for."""
    dtype = resolve_kv_cache_dtype(model, config.kv_cache.kv_cache_dtype)
    if config.lm_head_dtype is not None:
        quantize_lm_head(model.network, get_format(f"{config.lm_head_dtype}/row"))
    if config.activation_dtype is not None and not quantize_activations(
        model.network, get_format(config.activation_dtype)
    ):
        raise ModelError(
            f"no layer of this model can take {config.activation_dtype} activations on {model.device}: it needs 4- or "
            "8-bit integer weights without activations of their own; leave the activation dtype out."
        )
    resolved = _ResolvedConfig(model, config, adapters, config.resolve_max_model_len(model), dtype)
    cache = config.kv_cache
    check_kv_cache(model, config, dtype)
    if (reason := _own_cache_reason(model)) is not None:
        return _build_own_cache(resolved, reason)
    if config.compiled and model.device.type == "cuda" and resolved.eager_reason is not None:
        logger.warning("The network runs eagerly, which is slower than the fused path: %s.", resolved.eager_reason)
    if resolved.runs_fused:
        _dequantize_plain_layers(model)  # before the KV cache takes what memory is left
        if cache.kv_token_cap is None and cache.page_selection is None:  # as other runners run the module
            adapters.stack(decoder.linear_groups(model))
    if carved_routes_of(model.network) is not None:
        built = _build_routed(resolved)
    elif cache.kv_token_cap is not None:
        built = _build_bounded(resolved, cache.kv_token_cap)
    elif cache.page_selection is not None:
        built = _build_sparse(resolved, cache.page_selection)
    elif cache.kv_profile is not None:
        built = _build_per_head(resolved, eviction_policy(model, cache))
    else:
        built = _build_paged(resolved)
    if config.tensor_parallel_size == 1:
        _dequantize_plain_layers(model)  # those that the runner has not taken over
    return built


def _own_cache_reason(model: Model) -> str | None:
    """Return why the network must keep its KV cache itself; None if the cache can be paged."""
    if isinstance(model.network, ProgramNetwork):
        return "its network runs as one program, which reads and returns its KV cache"
    return unpaged_reason(model.anatomy)


def check_kv_cache(model: Model, config: EngineConfig, kv_cache_dtype: str | None) -> None:
    """Refuse settings of the KV cache that this model cannot have; its weights may still be on the meta device."""
    cache = config.kv_cache
    policy = cache.kv_token_cap or cache.page_selection or cache.kv_profile
    if carved_routes_of(model.network) is not None:
        if policy is not None or config.tensor_parallel_size > 1 or config.adapters or config.max_loras:
            raise ModelError(
                "a router ahead of the layers chooses the experts of this model: serve it on one device, without "
                "adapters and without eviction, selection or caps of the KV cache."
            )
    elif config.expert_slots is not None:
        raise ModelError(
            "expert slots are for models whose feed-forwards were carved into experts (carve-experts); leave them out."
        )
    if (reason := _own_cache_reason(model)) is not None:
        if policy is not None or kv_cache_dtype is not None or config.tensor_parallel_size > 1:
            raise ModelError(
                f"{reason}, so its KV cache is not paged: serve it without tensor parallelism and settings of the KV "
                "cache."
            )
        return
    if decoder.has_sinks(model) and policy is not None:
        raise ModelError(
            "this model has attention sinks, which need a complete KV cache; leave out eviction, selection and caps."
        )
    if decoder.reuses_maps(model) and (policy is not None or config.tensor_parallel_size > 1):
        raise ModelError(
            "some layers of this model use the attention map of another layer and have no keys of their own: serve it "
            "without tensor parallelism, eviction, selection and caps of the KV cache."
        )
    if cache.page_selection is not None:
        sparse_attention_heads(model)
    if cache.kv_token_cap is not None:
        check_evictable(model)


def _dequantize_plain_layers(model: Model) -> None:
    """Dequantize layers without a kernel once; without this, every step would."""
    total = len(quantized_layers(model.network))
    plain = dequantize_without_kernel(model.network, model.network.dtype)
    if plain:
        formats = ", ".join(sorted({format_name(layer.scheme.weight) for layer in plain}))
        logger.warning(
            "%d of %d quantized layers (%s) have no kernel on this device, so their weights were dequantized at load: "
            "they take as much memory and time as those of the dense model.", len(plain), total, formats,
        )  # fmt: skip


def _build_own_cache(resolved: _ResolvedConfig, reason: str) -> tuple[Scheduler, Runner]:
    """Let transformers keep a cache for every request; blocks only bound how many requests run at once."""
    model, config = resolved.model, resolved.config
    if resolved.adapters.layers:
        raise ModelError(f"{reason}, so its KV cache is not paged: serve it without adapters.")
    logger.warning("Requests run one after another with a cache of the network's own: %s.", reason)
    bytes_per_block = block_bytes(model.anatomy, resolved.block_size, model.network.dtype)
    num_blocks = resolved.num_blocks(bytes_per_block, config.max_num_seqs * resolved.blocks_per_request, model.device)
    pool = BlockPool(num_blocks, resolved.block_size, enable_prefix_caching=False, block_bytes=bytes_per_block)
    _dequantize_plain_layers(model)
    return resolved.scheduler(PagedCacheManager(pool)), OwnCacheRunner(model)


def _build_paged(resolved: _ResolvedConfig) -> tuple[Scheduler, Runner]:
    """Keep every token; a block holds all layers and heads."""
    model, config, dtype = resolved.model, resolved.config, resolved.kv_cache_dtype
    ranks = config.tensor_parallel_size
    if ranks > 1 and dtype is not None:
        raise ModelError(f"an {dtype} KV cache is not split over several devices yet: use one.")
    device = torch.device(config.device) if ranks > 1 else model.device
    bytes_per_block = -(-block_bytes(model.anatomy, resolved.block_size, model.network.dtype, dtype) // ranks)
    num_blocks = resolved.num_blocks(bytes_per_block, config.max_num_seqs * resolved.blocks_per_request, device)
    pool = BlockPool(
        num_blocks, resolved.block_size, enable_prefix_caching=resolved.cache.enable_prefix_caching,
        block_bytes=ranks * bytes_per_block,
    )  # fmt: skip
    return resolved.scheduler(PagedCacheManager(pool)), paged_runner(resolved, num_blocks)


def paged_runner(resolved: _ResolvedConfig, num_blocks: int) -> Runner:
    """Return the fastest runner that this model has on this device."""
    model, config = resolved.model, resolved.config
    sizes: dict[str, Any] = {
        "num_blocks": num_blocks, "block_size": resolved.block_size, "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens, "max_model_len": resolved.max_model_len,
    }  # fmt: skip
    if config.tensor_parallel_size > 1:
        device_type = config.device.partition(":")[0]
        return TensorParallelRunner(
            model, RunnerSizes(**sizes), config.tensor_parallel_size, device_type, resolved.adapters
        )
    if resolved.runs_fused:
        return paged_gpu_runner(resolved, num_blocks)
    return ModelRunner(
        model, **sizes, compiled=config.compiled, adapters=resolved.adapters, kv_cache_dtype=resolved.kv_cache_dtype
    )


def paged_gpu_runner(resolved: _ResolvedConfig, num_blocks: int) -> GpuRunner:
    return GpuRunner(resolved.model, **_gpu_settings(resolved, num_blocks), adapters=resolved.adapters)


def _gpu_settings(resolved: _ResolvedConfig, num_blocks: int) -> dict[str, Any]:
    max_num_seqs, length = resolved.config.max_num_seqs, resolved.max_model_len
    pages = partial(
        PagedGpuPages, resolved.model, num_blocks, resolved.block_size, max_num_seqs, length, resolved.kv_cache_dtype
    )
    return {"make_pages": pages, "max_num_seqs": max_num_seqs, "max_model_len": length}


def _build_routed(resolved: _ResolvedConfig) -> tuple[Scheduler, Runner]:
    """Keep every token, and the experts of `expert_slots` slots; route tokens before they are scheduled."""
    model, config = resolved.model, resolved.config
    bytes_per_block = block_bytes(model.anatomy, resolved.block_size, model.network.dtype, resolved.kv_cache_dtype)
    num_blocks = resolved.num_blocks(bytes_per_block, config.max_num_seqs * resolved.blocks_per_request, model.device)
    pool = BlockPool(
        num_blocks, resolved.block_size, enable_prefix_caching=resolved.cache.enable_prefix_caching,
        block_bytes=bytes_per_block,
    )  # fmt: skip
    if resolved.runs_fused and config.expert_slots is None:
        return resolved.scheduler(PagedCacheManager(pool)), RoutedGpuRunner(
            model, **_gpu_settings(resolved, num_blocks)
        )
    experts: dict[str, Any] = {
        "expert_slots": config.expert_slots, "expert_policy": config.expert_policy,
        "expert_prefetch": config.expert_prefetch,
    }  # fmt: skip
    runner: RoutedRunner | SlottedGpuRunner
    if resolved.runs_fused:
        runner = SlottedGpuRunner(model, **_gpu_settings(resolved, num_blocks), **experts)
    else:
        runner = RoutedRunner(
            model, num_blocks=num_blocks, block_size=resolved.block_size, max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens, max_model_len=resolved.max_model_len,
            compiled=config.compiled, kv_cache_dtype=resolved.kv_cache_dtype, **experts,
        )  # fmt: skip
    num_experts = runner.token_router.num_experts
    limited = config.expert_slots is not None and config.expert_slots < num_experts
    scheduler = ExpertScheduler(
        PagedCacheManager(pool), route=runner.token_router.route, resident=runner.resident, num_experts=num_experts,
        max_experts=config.expert_slots if limited else None, expert_batching=config.expert_batching,
        max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs,
        prefill_chunk_size=config.prefill_chunk_size, max_queued=config.max_queued,
    )  # fmt: skip
    return scheduler, runner


def _build_sparse(resolved: _ResolvedConfig, selection: SparseAttentionConfig) -> tuple[Scheduler, Runner]:
    """Evict nothing and attend to selected pages; with an offload config, pages live in host memory."""
    model, config, dtype = resolved.model, resolved.config, resolved.kv_cache_dtype
    offload = resolved.cache.kv_offload
    device = model.device if offload is None else torch.device("cpu")
    bytes_per_block = block_bytes(model.anatomy, resolved.block_size, model.network.dtype, dtype)
    num_blocks = resolved.num_blocks(bytes_per_block, config.max_num_seqs * resolved.blocks_per_request, device)
    pool = BlockPool(
        num_blocks, resolved.block_size, enable_prefix_caching=resolved.cache.enable_prefix_caching,
        block_bytes=bytes_per_block,
    )  # fmt: skip
    runner = SparseRunner(
        model, num_blocks=num_blocks, block_size=resolved.block_size, max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens, max_model_len=resolved.max_model_len, selection=selection,
        kv_offload=offload, compiled=config.compiled, adapters=resolved.adapters, kv_cache_dtype=dtype,
    )  # fmt: skip
    return resolved.scheduler(PagedCacheManager(pool)), runner


def _build_bounded(resolved: _ResolvedConfig, bound: BoundedCacheConfig) -> tuple[Scheduler, Runner]:
    """Bound each request's KV cache. A step computes a prompt chunk beside one token of every request."""
    model, config, dtype = resolved.model, resolved.config, resolved.kv_cache_dtype
    compressor = InfiniPotCompressor(model, bound.method)
    positions = getattr(model.network.config, "max_position_embeddings", None)
    size = bound.size(len(compressor.prompt), positions, resolved.block_size)
    blocks_per_request = -(-size.capacity // resolved.block_size)
    bytes_per_block = bounded_block_bytes(model.anatomy, resolved.block_size, model.network.dtype, dtype)
    num_blocks = resolved.num_blocks(bytes_per_block, config.max_num_seqs * blocks_per_request, model.device)
    if num_blocks < blocks_per_request:
        raise ResourceError(
            f"the KV cache holds {num_blocks * resolved.block_size:,} tokens, and the cap is "
            f"{size.capacity:,}, which takes {blocks_per_request * bytes_per_block:,} bytes; "
            "give more memory, or a smaller cap."
        )
    pool = BlockPool(num_blocks, resolved.block_size, enable_prefix_caching=False, block_bytes=bytes_per_block)
    empty = partial(BoundedCacheState.empty, size.capacity, model.device)
    cache_manager = BoundedCacheManager(pool, size, empty, reuse=resolved.cache.enable_prefix_caching)
    tokens = resolved.chunk_size + config.max_num_seqs
    runner = BoundedRunner(
        model, compressor, size, num_blocks=num_blocks, block_size=resolved.block_size, max_num_batched_tokens=tokens,
        max_num_seqs=config.max_num_seqs, compiled=config.compiled, adapters=resolved.adapters, kv_cache_dtype=dtype,
    )  # fmt: skip
    return resolved.scheduler(cache_manager, tokens), runner


def _build_per_head(resolved: _ResolvedConfig, policy: EvictionPolicy) -> tuple[Scheduler, Runner]:
    """Evict per head as the policy says. A step computes a prompt chunk beside one token of every request."""
    model, config = resolved.model, resolved.config
    head_dim = find_kv_shape(model).head_dim
    tokens, pages_per_cluster = resolved.chunk_size + config.max_num_seqs, resolved.blocks_per_request + 1
    row = row_bytes(head_dim, model.network.dtype, resolved.kv_cache_dtype)
    bytes_per_page = page_bytes(policy.clusters, row, resolved.block_size)
    staging = staging_pages(policy, tokens, resolved.chunk_size)
    max_pages = config.max_num_seqs * len(policy.budgets) * pages_per_cluster
    num_pages = resolved.num_blocks(bytes_per_page, max_pages, model.device, reserved_bytes=staging * bytes_per_page)
    pool = BlockPool(num_pages, resolved.block_size, enable_prefix_caching=False, block_bytes=bytes_per_page)
    cache_manager = PerHeadCacheManager(pool, policy, pages_per_cluster, reuse=resolved.cache.enable_prefix_caching)
    cache = PerHeadCache.empty(
        policy.clusters, head_dim, num_pages=num_pages, num_staging_pages=staging, block_size=resolved.block_size,
        max_num_seqs=config.max_num_seqs, max_pages_per_cluster=pages_per_cluster, dtype=model.network.dtype,
        device=model.device, kv_quant=kv_quant_format(resolved.kv_cache_dtype, head_dim),
    )  # fmt: skip
    return resolved.scheduler(cache_manager, tokens), per_head_runner(resolved, cache, policy, tokens)


def per_head_runner(
    resolved: _ResolvedConfig, cache: PerHeadCache, policy: EvictionPolicy, max_num_batched_tokens: int
) -> Runner:
    if resolved.runs_fused:
        return per_head_gpu_runner(resolved, cache, policy)
    return PerHeadRunner(
        resolved.model, cache, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=resolved.config.max_num_seqs,
        max_model_len=resolved.max_model_len, compiled=resolved.config.compiled, adapters=resolved.adapters,
    )  # fmt: skip


def per_head_gpu_runner(resolved: _ResolvedConfig, cache: PerHeadCache, policy: EvictionPolicy) -> Runner:
    max_num_seqs, length = resolved.config.max_num_seqs, resolved.max_model_len
    pages = partial(PerHeadGpuPages, resolved.model, cache, policy, length)
    return GpuRunner(resolved.model, pages, max_num_seqs=max_num_seqs, max_model_len=length, adapters=resolved.adapters)


def staging_pages(policy: EvictionPolicy, max_num_batched_tokens: int, chunk_size: int) -> int:
    """Return the pages that the chunks of any step may borrow: each begins and ends within a page."""
    shortest = max(min(policy.scorer.window, chunk_size // 2), 1)
    per_cluster = -(-max_num_batched_tokens // policy.block_size) + max_num_batched_tokens // shortest + 1
    return len(policy.budgets) * per_cluster
