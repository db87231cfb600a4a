"""The parts of an engine, in the sizes that were asked for: a scheduler over its memory, a runner over its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from smelt.errors import ModelError, RequestError, ResourceError
from smelt.kvcache.eviction.policy import EvictionPolicy
from smelt.kvcache.eviction.prefill import check_evictable, kv_shape_of
from smelt.kvcache.eviction.profile import EvictionProfile
from smelt.kvcache.selection.config import SparseAttentionConfig
from smelt.kvcache.selection.page_cache import OffloadConfig
from smelt.kvcache.streaming.config import BoundedCacheConfig
from smelt.kvcache.streaming.infinipot import InfiniPotCompressor
from smelt.measure.memory import free_memory
from smelt.models.model import Model
from smelt.serve.engine.adapters import Adapters
from smelt.serve.engine.attention import block_bytes, row_bytes, rows_of
from smelt.serve.engine.blocks import BlockPool
from smelt.serve.engine.bounded.held import BoundedCacheState
from smelt.serve.engine.bounded.memory import BoundedCacheManager
from smelt.serve.engine.bounded.pages import pot_block_bytes
from smelt.serve.engine.bounded.runner import BoundedRunner
from smelt.serve.engine.kv_cache_manager import KVCacheManager, PagedCacheManager
from smelt.serve.engine.per_head.cache import PerHeadCache, page_bytes
from smelt.serve.engine.per_head.memory import PerHeadCacheManager
from smelt.serve.engine.runners import Runner, ragged_runner_for, runner_for
from smelt.serve.engine.scheduler import Scheduler
from smelt.serve.engine.sparse_runner import SparseRunner

SHARE = {"cpu": 0.3, "cuda": 0.8}  # of the memory that is free: what the cache takes unless told otherwise


@dataclass(frozen=True)
class Sizes:
    """What an engine is told."""

    max_model_len: int
    kv_cache_bytes: int | None
    block: int
    max_num_batched_tokens: int
    max_num_seqs: int
    chunk: int | None
    max_queued: int
    prefix_cache: bool
    kind: str | None = None  # of rows of keys and values; None: the network's own numbers

    @property
    def most_blocks(self) -> int:
        """Of one request; its last block may be only begun."""
        return -(-self.max_model_len // self.block)

    def blocks(self, each: int, most: int, device: torch.device, beside: int = 0) -> int:
        """Blocks of so many bytes that fit into the memory for them, less what must be beside them; never more than all
        requests could use."""
        memory = (
            self.kv_cache_bytes if self.kv_cache_bytes is not None else int(SHARE[device.type] * free_memory(device))
        )
        found = min((memory - beside) // max(each, 1), most)
        if found < 1:
            wanted = f"which takes {each:,}" + (f", beside the {beside:,} of a step's chunks" if beside else "")
            raise RequestError(f"{memory:,} bytes hold no block of {self.block} tokens, {wanted}; give more.")
        return int(found)

    def scheduler(self, memory: KVCacheManager, max_num_batched_tokens: int, chunk: int | None) -> Scheduler:
        return Scheduler(
            memory,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            prefill_chunk_size=chunk,
            max_queued=self.max_queued,
        )


def plain_parts(
    model: Model, sizes: Sizes, adapters: Adapters, devices: Sequence[str], compiled: bool
) -> tuple[Scheduler, Runner]:
    """Every token is kept; a block is the same for all layers and heads."""
    if len(devices) > 1 and sizes.kind is not None:
        raise ModelError(f"keys and values are not held in {sizes.kind} on several devices yet: use one.")
    where = torch.device(devices[0]) if len(devices) > 1 else model.device
    each = -(-block_bytes(model.anatomy, sizes.block, model.network.dtype, sizes.kind) // len(devices))
    num_blocks = sizes.blocks(each, sizes.max_num_seqs * sizes.most_blocks, where)
    memory = PagedCacheManager(BlockPool(num_blocks, sizes.block, prefix_cache=sizes.prefix_cache))
    runner = runner_for(
        model,
        compiled,
        adapters,
        devices,
        num_blocks=num_blocks,
        block_size=sizes.block,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        kind=sizes.kind,
    )
    return sizes.scheduler(memory, sizes.max_num_batched_tokens, sizes.chunk), runner


def selecting_parts(
    model: Model, sizes: Sizes, adapters: Adapters, devices: Sequence[str], compiled: bool,
    selection: SparseAttentionConfig, kv_offload: OffloadConfig | None,
) -> tuple[Scheduler, Runner]:  # fmt: skip
    """Nothing is evicted; what a token attends to is chosen. With a residence, pages are in the host's memory."""
    if len(devices) > 1:
        raise ModelError("pages are not chosen on several devices yet: use one.")
    home = model.device if kv_offload is None else torch.device("cpu")
    each = block_bytes(model.anatomy, sizes.block, model.network.dtype, sizes.kind)
    num_blocks = sizes.blocks(each, sizes.max_num_seqs * sizes.most_blocks, home)
    memory = PagedCacheManager(BlockPool(num_blocks, sizes.block, prefix_cache=sizes.prefix_cache))
    runner = SparseRunner(
        model,
        num_blocks=num_blocks,
        block_size=sizes.block,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        selection=selection,
        kv_offload=kv_offload,
        compiled=compiled,
        adapters=adapters,
        kind=sizes.kind,
    )
    return sizes.scheduler(memory, sizes.max_num_batched_tokens, sizes.chunk), runner


def capped_parts(
    model: Model, sizes: Sizes, adapters: Adapters, devices: Sequence[str], compiled: bool, cap: BoundedCacheConfig
) -> tuple[Scheduler, Runner]:
    """Each request's keys and values are a pot. A step computes a chunk of a prompt beside a token of every request."""
    if len(devices) > 1:
        raise ModelError("a cap is not kept on several devices yet: use one.")
    distiller = InfiniPotCompressor(model, cap.method)
    window = getattr(model.network.config, "max_position_embeddings", None)
    size = cap.size(len(distiller.prompt), window, sizes.block)
    most = -(-size.capacity // sizes.block)
    each = pot_block_bytes(model.anatomy, sizes.block, model.network.dtype, sizes.kind)
    num_blocks = sizes.blocks(each, sizes.max_num_seqs * most, model.device)
    if num_blocks < most:
        raise ResourceError(
            f"the KV cache holds {num_blocks * sizes.block:,} tokens, and the cap is {size.capacity:,}, which "
            f"takes {most * each:,} bytes; give more memory, or a smaller cap."
        )
    empty = partial(BoundedCacheState.empty, size.capacity, model.device)
    pool = BlockPool(num_blocks, sizes.block, prefix_cache=False)
    memory = BoundedCacheManager(pool, size, empty, carry=sizes.prefix_cache)
    chunk = sizes.chunk or sizes.max_num_batched_tokens
    tokens = chunk + sizes.max_num_seqs
    runner = BoundedRunner(
        model,
        distiller,
        size,
        num_blocks=num_blocks,
        block_size=sizes.block,
        max_num_batched_tokens=tokens,
        max_num_seqs=sizes.max_num_seqs,
        compiled=compiled,
        adapters=adapters,
        kind=sizes.kind,
    )
    return sizes.scheduler(memory, tokens, chunk), runner


def retention_of(model: Model, kv: EvictionPolicy | EvictionProfile | str | Path, block: int) -> EvictionPolicy:
    """What heads of this model keep, from a profile or its file."""
    if isinstance(kv, EvictionPolicy):
        return kv
    profile = kv if isinstance(kv, EvictionProfile) else EvictionProfile.load(Path(kv))
    check_evictable(model)
    profile.check_model(kv_shape_of(model))
    return EvictionPolicy.from_profile(profile, block)


def ragged_parts(
    model: Model, sizes: Sizes, adapters: Adapters, devices: Sequence[str], compiled: bool, retention: EvictionPolicy
) -> tuple[Scheduler, Runner]:
    """Heads keep what a profile says. A step computes a chunk of a prompt beside a token of every request."""
    if len(devices) > 1:
        raise ModelError("a compressed cache is not split over several devices yet: use one.")
    check_evictable(model)
    shape = kv_shape_of(model)
    chunk = sizes.chunk or sizes.max_num_batched_tokens
    tokens, width = chunk + sizes.max_num_seqs, sizes.most_blocks + 1
    row = row_bytes(shape.head_dim, model.network.dtype, sizes.kind)
    each = page_bytes(retention.clusters, row, sizes.block)
    staging = staging_pages(retention, tokens, chunk)
    most = sizes.max_num_seqs * len(retention.budgets) * width
    pages = sizes.blocks(each, most, model.device, beside=staging * each)
    memory = PerHeadCacheManager(
        BlockPool(pages, sizes.block, prefix_cache=False), retention, width, carry=sizes.prefix_cache
    )
    cache = PerHeadCache.empty(
        retention.clusters, shape.head_dim, pages=pages, staging=staging, size=sizes.block, slots=sizes.max_num_seqs,
        most=width, dtype=model.network.dtype, device=model.device, rows=rows_of(sizes.kind, shape.head_dim),
    )  # fmt: skip
    runner = ragged_runner_for(
        model, compiled, adapters, cache, retention, max_num_batched_tokens=tokens, max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
    )  # fmt: skip
    return sizes.scheduler(memory, tokens, chunk), runner


def staging_pages(retention: EvictionPolicy, max_num_batched_tokens: int, chunk: int) -> int:
    """Enough for the chunks of any step: each begins and ends within a page, and none that is compressed is short."""
    shortest = max(min(retention.scorer.window, chunk // 2), 1)
    return len(retention.budgets) * (
        -(-max_num_batched_tokens // retention.block_size) + max_num_batched_tokens // shortest + 1
    )
