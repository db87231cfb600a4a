"""Which runner a model gets: fused and captured on a GPU, a program on a processor, or the network as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from smelt.kvcache.eviction.policy import EvictionPolicy
from smelt.models.model import Model
from smelt.runtime import decoder
from smelt.serve.engine.adapters import Adapters
from smelt.serve.engine.per_head.cache import RaggedCache
from smelt.serve.engine.per_head.runner import RaggedRunner
from smelt.serve.engine.runner import Launched, Runner
from smelt.serve.engine.scheduler import Step


class AnyRunner(Protocol):
    """What the engine needs of a runner."""

    ahead: int  # steps that are launched before the one before them is read
    ends: tuple[int, ...]  # the model's own ends of text

    @property
    def path(self) -> str:
        """What computes a step."""

    def prepare(self) -> None:
        """What would be made on first use."""

    def launch(self, step: Step) -> Launched: ...


def runner_for(
    model: Model, compiled: bool, adapters: Adapters | None, devices: Sequence[str], *, blocks: int, size: int,
    most_tokens: int, most_requests: int, context: int, kind: str | None = None,
) -> AnyRunner:  # fmt: skip
    """`kind`: of rows of keys and values, see `PagedCache`. `compiled` False: the network as it is, whatever else there
    would be. With several devices the model is split over them; it is still on none of them."""
    sizes: dict[str, Any] = {
        "blocks": blocks, "size": size, "most_tokens": most_tokens, "most_requests": most_requests, "context": context,
    }  # fmt: skip
    if len(devices) > 1:
        from smelt.serve.engine.tensor_parallel import ParallelRunner, Sizes

        where = devices[0].partition(":")[0]
        return ParallelRunner(model, Sizes(**sizes), len(devices), where, adapters or Adapters(model, {}))
    if compiled and model.device.type == "cuda" and decoder.reason_against(model) is None:
        return gpu_runner(
            model, adapters, blocks=blocks, size=size, most_requests=most_requests, context=context, kind=kind
        )
    return Runner(model, **sizes, compiled=compiled, adapters=adapters, kind=kind)


def gpu_runner(
    model: Model, adapters: Adapters | None, *, blocks: int, size: int, most_requests: int, context: int,
    kind: str | None = None,
) -> AnyRunner:  # fmt: skip
    """Fused and captured."""
    from smelt.serve.engine.gpu_pages import PlainPages
    from smelt.serve.engine.gpu_runner import GpuRunner

    pages = partial(PlainPages, model, blocks, size, most_requests, context, kind)
    return GpuRunner(model, pages, most_requests=most_requests, context=context, adapters=adapters)


def ragged_runner_for(
    model: Model, compiled: bool, adapters: Adapters | None, cache: RaggedCache, retention: EvictionPolicy, *,
    most_tokens: int, most_requests: int, context: int,
) -> AnyRunner:  # fmt: skip
    """The same choice for a cache whose pages belong to clusters of heads."""
    if compiled and model.device.type == "cuda" and decoder.reason_against(model) is None:
        return ragged_gpu_runner(model, adapters, cache, retention, most_requests=most_requests, context=context)
    return RaggedRunner(
        model, cache, most_tokens=most_tokens, most_requests=most_requests, context=context, compiled=compiled,
        adapters=adapters,
    )  # fmt: skip


def ragged_gpu_runner(
    model: Model, adapters: Adapters | None, cache: RaggedCache, retention: EvictionPolicy, *, most_requests: int,
    context: int,
) -> AnyRunner:  # fmt: skip
    from smelt.serve.engine.gpu_runner import GpuRunner
    from smelt.serve.engine.per_head.gpu_pages import RaggedPages

    pages = partial(RaggedPages, model, cache, retention, context)
    return GpuRunner(model, pages, most_requests=most_requests, context=context, adapters=adapters)
