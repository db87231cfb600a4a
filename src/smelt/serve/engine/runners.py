"""Which runner a model gets: fused and captured on a GPU, a program on a processor, or the network as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from smelt.kvcache.eviction.policy import EvictionPolicy
from smelt.models.model import Model
from smelt.runtime import decoder
from smelt.serve.engine.adapters import Adapters
from smelt.serve.engine.per_head.cache import PerHeadCache
from smelt.serve.engine.per_head.runner import PerHeadRunner
from smelt.serve.engine.runner import InflightBatch, ModelRunner
from smelt.serve.engine.scheduler import ScheduledBatch


class Runner(Protocol):
    """What the engine needs of a runner."""

    max_inflight_steps: int  # steps that are launched before the one before them is read
    eos_token_ids: tuple[int, ...]  # the model's own ends of text

    @property
    def backend(self) -> str:
        """What computes a step."""

    def warmup(self) -> None:
        """What would be made on first use."""

    def launch(self, step: ScheduledBatch) -> InflightBatch: ...


def runner_for(
    model: Model,
    compiled: bool,
    adapters: Adapters | None,
    devices: Sequence[str],
    *,
    num_blocks: int,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    kind: str | None = None,
) -> Runner:
    """`kind`: of rows of keys and values, see `PagedCache`. `compiled` False: the network as it is, whatever else there
    would be. With several devices the model is split over them; it is still on none of them."""
    sizes: dict[str, Any] = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
    }
    if len(devices) > 1:
        from smelt.serve.engine.tensor_parallel import Sizes, TensorParallelRunner

        where = devices[0].partition(":")[0]
        return TensorParallelRunner(model, Sizes(**sizes), len(devices), where, adapters or Adapters(model, {}))
    if compiled and model.device.type == "cuda" and decoder.reason_against(model) is None:
        return gpu_runner(
            model,
            adapters,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            kind=kind,
        )
    return ModelRunner(model, **sizes, compiled=compiled, adapters=adapters, kind=kind)


def gpu_runner(
    model: Model, adapters: Adapters | None, *, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int,
    kind: str | None = None,
) -> Runner:  # fmt: skip
    """Fused and captured."""
    from smelt.serve.engine.gpu_pages import PagedGpuPages
    from smelt.serve.engine.gpu_runner import GpuRunner

    pages = partial(PagedGpuPages, model, num_blocks, block_size, max_num_seqs, max_model_len, kind)
    return GpuRunner(model, pages, max_num_seqs=max_num_seqs, max_model_len=max_model_len, adapters=adapters)


def ragged_runner_for(
    model: Model, compiled: bool, adapters: Adapters | None, cache: PerHeadCache, retention: EvictionPolicy, *,
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int,
) -> Runner:  # fmt: skip
    """The same choice for a cache whose pages belong to clusters of heads."""
    if compiled and model.device.type == "cuda" and decoder.reason_against(model) is None:
        return ragged_gpu_runner(
            model, adapters, cache, retention, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
    return PerHeadRunner(
        model,
        cache,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        compiled=compiled,
        adapters=adapters,
    )


def ragged_gpu_runner(
    model: Model, adapters: Adapters | None, cache: PerHeadCache, retention: EvictionPolicy, *, max_num_seqs: int,
    max_model_len: int,
) -> Runner:  # fmt: skip
    from smelt.serve.engine.gpu_runner import GpuRunner
    from smelt.serve.engine.per_head.gpu_pages import PerHeadGpuPages

    pages = partial(PerHeadGpuPages, model, cache, retention, max_model_len)
    return GpuRunner(model, pages, max_num_seqs=max_num_seqs, max_model_len=max_model_len, adapters=adapters)
