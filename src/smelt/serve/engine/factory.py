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
from smelt.serve.engine.bounded.memory import CappedMemory
from smelt.serve.engine.bounded.pages import pot_block_bytes
from smelt.serve.engine.bounded.runner import CappedRunner
from smelt.serve.engine.kv_cache_manager import Memory, PlainMemory
from smelt.serve.engine.per_head.cache import RaggedCache, page_bytes
from smelt.serve.engine.per_head.memory import RaggedMemory
from smelt.serve.engine.runners import AnyRunner, ragged_runner_for, runner_for
from smelt.serve.engine.scheduler import Scheduler
from smelt.serve.engine.sparse_runner import SelectingRunner

SHARE = {"cpu": 0.3, "cuda": 0.8}  # of the memory that is free: what the cache takes unless told otherwise


@dataclass(frozen=True)
class Sizes:
    """What an engine is told."""

    context: int
    cache_bytes: int | None
    block: int
    batch_tokens: int
    batch_requests: int
    chunk: int | None
    queue: int
    prefix_cache: bool
    kind: str | None = None  # of rows of keys and values; None: the network's own numbers

    @property
    def most_blocks(self) -> int:
        """Of one request; its last block may be only begun."""
        return -(-self.context // self.block)

    def blocks(self, each: int, most: int, device: torch.device, beside: int = 0) -> int:
        """Blocks of so many bytes that fit into the memory for them, less what must be beside them; never more than all
        requests could use."""
        memory = self.cache_bytes if self.cache_bytes is not None else int(SHARE[device.type] * free_memory(device))
        found = min((memory - beside) // max(each, 1), most)
        if found < 1:
            wanted = f"which takes {each:,}" + (f", beside the {beside:,} of a step's chunks" if beside else "")
            raise RequestError(f"{memory:,} bytes hold no block of {self.block} tokens, {wanted}; give more.")
        return int(found)

    def scheduler(self, memory: Memory, batch_tokens: int, chunk: int | None) -> Scheduler:
        return Scheduler(
            memory, most_tokens=batch_tokens, most_requests=self.batch_requests, chunk=chunk,
            most_waiting=self.queue,
        )  # fmt: skip


def plain_parts(
    model: Model, sizes: Sizes, adapters: Adapters, devices: Sequence[str], compiled: bool
) -> tuple[Scheduler, AnyRunner]:
    """Every token is kept; a block is the same for all layers and heads."""
    if len(devices) > 1 and sizes.kind is not None:
        raise ModelError(f"keys and values are not held in {sizes.kind} on several devices yet: use one.")
    where = torch.device(devices[0]) if len(devices) > 1 else model.device
    each = -(-block_bytes(model.anatomy, sizes.block, model.network.dtype, sizes.kind) // len(devices))
    blocks = sizes.blocks(each, sizes.batch_requests * sizes.most_blocks, where)
    memory = PlainMemory(BlockPool(blocks, sizes.block, prefix_cache=sizes.prefix_cache))
    runner = runner_for(
        model, compiled, adapters, devices, blocks=blocks, size=sizes.block, most_tokens=sizes.batch_tokens,
        most_requests=sizes.batch_requests, context=sizes.context, kind=sizes.kind,
    )  # fmt: skip
    return sizes.scheduler(memory, sizes.batch_tokens, sizes.chunk), runner


def selecting_parts(
    model: Model, sizes: Sizes, adapters: Adapters, devices: Sequence[str], compiled: bool,
    selection: SparseAttentionConfig, residence: OffloadConfig | None,
) -> tuple[Scheduler, AnyRunner]:  # fmt: skip
    """Nothing is evicted; what a token attends to is chosen. With a residence, pages are in the host's memory."""
    if len(devices) > 1:
        raise ModelError("pages are not chosen on several devices yet: use one.")
    home = model.device if residence is None else torch.device("cpu")
    each = block_bytes(model.anatomy, sizes.block, model.network.dtype, sizes.kind)
    blocks = sizes.blocks(each, sizes.batch_requests * sizes.most_blocks, home)
    memory = PlainMemory(BlockPool(blocks, sizes.block, prefix_cache=sizes.prefix_cache))
    runner = SelectingRunner(
        model, blocks=blocks, size=sizes.block, most_tokens=sizes.batch_tokens, most_requests=sizes.batch_requests,
        context=sizes.context, selection=selection, residence=residence, compiled=compiled, adapters=adapters,
        kind=sizes.kind,
    )  # fmt: skip
    return sizes.scheduler(memory, sizes.batch_tokens, sizes.chunk), runner


def capped_parts(
    model: Model, sizes: Sizes, adapters: Adapters, devices: Sequence[str], compiled: bool, cap: BoundedCacheConfig
) -> tuple[Scheduler, AnyRunner]:
    """Each request's keys and values are a pot. A step computes a chunk of a prompt beside a token of every request."""
    if len(devices) > 1:
        raise ModelError("a cap is not kept on several devices yet: use one.")
    distiller = InfiniPotCompressor(model, cap.rule)
    window = getattr(model.network.config, "max_position_embeddings", None)
    size = cap.size(len(distiller.prompt), window, sizes.block)
    most = -(-size.cap // sizes.block)
    each = pot_block_bytes(model.anatomy, sizes.block, model.network.dtype, sizes.kind)
    blocks = sizes.blocks(each, sizes.batch_requests * most, model.device)
    if blocks < most:
        raise ResourceError(
            f"the memory for keys and values holds {blocks * sizes.block:,} tokens, and the cap is {size.cap:,}, which "
            f"takes {most * each:,} bytes; give more memory, or a smaller cap."
        )
    empty = partial(BoundedCacheState.empty, size.cap, model.device)
    pool = BlockPool(blocks, sizes.block, prefix_cache=False)
    memory = CappedMemory(pool, size, empty, carry=sizes.prefix_cache)
    chunk = sizes.chunk or sizes.batch_tokens
    tokens = chunk + sizes.batch_requests
    runner = CappedRunner(
        model, distiller, size, blocks=blocks, size=sizes.block, most_tokens=tokens, most_requests=sizes.batch_requests,
        compiled=compiled, adapters=adapters, kind=sizes.kind,
    )  # fmt: skip
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
) -> tuple[Scheduler, AnyRunner]:
    """Heads keep what a profile says. A step computes a chunk of a prompt beside a token of every request."""
    if len(devices) > 1:
        raise ModelError("a compressed cache is not split over several devices yet: use one.")
    check_evictable(model)
    shape = kv_shape_of(model)
    chunk = sizes.chunk or sizes.batch_tokens
    tokens, width = chunk + sizes.batch_requests, sizes.most_blocks + 1
    row = row_bytes(shape.head_dim, model.network.dtype, sizes.kind)
    each = page_bytes(retention.clusters, row, sizes.block)
    staging = staging_pages(retention, tokens, chunk)
    most = sizes.batch_requests * len(retention.budgets) * width
    pages = sizes.blocks(each, most, model.device, beside=staging * each)
    memory = RaggedMemory(BlockPool(pages, sizes.block, prefix_cache=False), retention, width, carry=sizes.prefix_cache)
    cache = RaggedCache.empty(
        retention.clusters, shape.head_dim, pages=pages, staging=staging, size=sizes.block, slots=sizes.batch_requests,
        most=width, dtype=model.network.dtype, device=model.device, rows=rows_of(sizes.kind, shape.head_dim),
    )  # fmt: skip
    runner = ragged_runner_for(
        model, compiled, adapters, cache, retention, most_tokens=tokens, most_requests=sizes.batch_requests,
        context=sizes.context,
    )  # fmt: skip
    return sizes.scheduler(memory, tokens, chunk), runner


def staging_pages(retention: EvictionPolicy, most_tokens: int, chunk: int) -> int:
    """Enough for the chunks of any step: each begins and ends within a page, and none that is compressed is short."""
    shortest = max(min(retention.scorer.window, chunk // 2), 1)
    return len(retention.budgets) * (-(-most_tokens // retention.block_size) + most_tokens // shortest + 1)
