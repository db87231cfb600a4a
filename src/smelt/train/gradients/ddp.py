"""Compressed gradients in DistributedDataParallel: `compress_gradients(model, ExDyna(density=0.001))` and no more.

A communication hook, called by DDP once for every bucket of gradients. Gradients that are accumulated in `no_sync` stay
where they are until a backward that synchronises hands the sums to the hook. With a hook DDP does not divide by the
number of workers; the reducers do.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the types themselves.

from dataclasses import dataclass

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from smelt.errors import ConfigError, SmeltError
from smelt.train.gradients.autotune.auto import AutoCompression, compression_class, resolve_compressor
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compression import Compression
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.settings import Settings


def compress_gradients(
    model: DistributedDataParallel,
    compressor: Compressor | str,
    settings: Settings | None = None,
    *,
    vector_mb: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Compression:
    """From the next backward on the workers send each other only what the compressor chooses.

    `vector_mb`: how long the vectors are that are compressed each by itself while backward goes on; None: the whole
    model is one, as DEFT and a single threshold for everything need it. `scaler`: the gradient scaler, if the loss is
    scaled. `optimizer`: whose learning rate `Settings(form="paper")` reads. The compressor "auto", or `Auto(...)`,
    finds out in the first steps which one pays, if any does.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"compress_gradients takes a DistributedDataParallel, not {type(model).__name__}; wrap the model, or use "
            "smelt.train.gradients.step.CompressedStep."
        )
    if isinstance(compressor, str):
        compressor = resolve_compressor(compressor)
    named = {parameter: name for name, parameter in _trained(model)}
    compression = compression_class(compressor)(
        ((name, parameter) for parameter, name in named.items()),
        compressor,
        Workers(model.process_group),
        settings,
        vector_mb=vector_mb,
        scaler=scaler,
        optimizer=optimizer,
        watch_unused=model.find_unused_parameters or model.static_graph,
    )
    if isinstance(compression, AutoCompression):
        compression.overlaps_backward = True
    model.register_comm_hook(_Hook(compression, named, []), _reduce_bucket)
    return compression


@dataclass
class _Bucket:
    """A bucket whose gradients wait for their vectors."""

    gradients: dict[str, Tensor]
    buffer: Tensor
    future: Future[Tensor]


@dataclass
class _Hook:
    compression: Compression
    names: dict[torch.nn.Parameter, str]
    waiting: list[_Bucket]


def _reduce_bucket(state: _Hook, bucket: distributed.GradBucket) -> Future[Tensor]:
    if state.compression.plain:
        return _send_plainly(state.compression, bucket)
    names = (state.names[parameter] for parameter in bucket.parameters())  # type: ignore[index]
    entry = _Bucket(dict(zip(names, bucket.gradients(), strict=True)), bucket.buffer(), _future(bucket.buffer()))
    state.waiting.append(entry)
    try:
        for name, gradient in entry.gradients.items():
            state.compression.put(name, gradient)
    except SmeltError:
        state.compression.abandon()
        state.waiting.clear()
        raise
    for ready in [each for each in state.waiting if all(map(state.compression.done, each.gradients))]:
        for name, gradient in ready.gradients.items():
            state.compression.give(name, gradient)
        ready.future.set_result(ready.buffer)
        state.waiting.remove(ready)
    return entry.future


def _future(buffer: Tensor) -> Future[Tensor]:
    """That holds a tensor of that device when it is done; where it is a GPU, who waits for it waits in its stream."""
    return Future(devices=[buffer.device] if buffer.is_cuda else [])


def _send_plainly(compression: Compression, bucket: distributed.GradBucket) -> Future[Tensor]:
    """As DDP does it without a hook: while backward goes on."""
    assert isinstance(compression, AutoCompression)
    if bucket.is_last():
        compression.pass_by()
    buffer = bucket.buffer().div_(compression.workers.size)
    sent = distributed.all_reduce(buffer, group=compression.workers.group, async_op=True)
    assert sent is not None
    return sent.get_future().then(lambda future: future.value()[0])


def _trained(model: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    ignored = set(model.parameters_to_ignore)
    named = model.module.named_parameters()
    return [(name, parameter) for name, parameter in named if parameter.requires_grad and name not in ignored]
