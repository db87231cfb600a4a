"""Compressed gradients in DistributedDataParallel: `compress_gradients(model, ExDyna(density=0.001))`.

A communication hook, called by DDP once per bucket. Gradients accumulated in `no_sync` stay where they are until a
backward that synchronizes passes their sums to the hook. With a hook DDP does not divide by the world size; the
reducers do.
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
from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compression import BucketedCompression
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.deprecated import renamed_parameter
from smelt.train.gradients.settings import CompressionSettings


@renamed_parameter("vector_mb", "bucket_cap_mb")
def compress_gradients(
    model: DistributedDataParallel,
    compressor: Compressor | str,
    settings: CompressionSettings | None = None,
    *,
    bucket_cap_mb: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> BucketedCompression:
    """Compress the gradients that the ranks exchange, from the next backward on.

    `bucket_cap_mb`: size of the buckets that are compressed one by one during backward; None: the whole model is one
    bucket, as DEFT and a single threshold for everything need it. `scaler`: the gradient scaler, if the loss is scaled.
    `optimizer`: provides the learning rate for `error_feedback="lr_scaled"`, and is checked against a compressor's own
    momentum. The compressor "auto", or `Auto(...)`, measures in the first steps which one pays off, if any.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"compress_gradients takes a DistributedDataParallel, not {type(model).__name__}; wrap the model, or use "
            "smelt.train.CompressedStep."
        )
    if isinstance(compressor, str):
        compressor = resolve_compressor(compressor)
    names = {parameter: name for name, parameter in _trainable_parameters(model)}
    compression = compression_class(compressor)(
        ((name, parameter) for parameter, name in names.items()),
        compressor,
        Comm(model.process_group),
        settings,
        bucket_cap_mb=bucket_cap_mb,
        scaler=scaler,
        optimizer=optimizer,
        track_unused=model.find_unused_parameters or model.static_graph,
    )
    if isinstance(compression, AutoCompression):
        compression.overlaps_backward = True
    model.register_comm_hook(_HookState(compression, names, []), _reduce_ddp_bucket)
    return compression


@dataclass
class _PendingBucket:
    """A DDP bucket whose gradients wait for their means."""

    gradients: dict[str, Tensor]
    buffer: Tensor
    future: Future[Tensor]


@dataclass
class _HookState:
    compression: BucketedCompression
    names: dict[torch.nn.Parameter, str]
    pending: list[_PendingBucket]


def _reduce_ddp_bucket(state: _HookState, bucket: distributed.GradBucket) -> Future[Tensor]:
    if state.compression.uses_plain_ddp:
        return _all_reduce_plain(state.compression, bucket)
    names = (state.names[parameter] for parameter in bucket.parameters())  # type: ignore[index]
    gradients = dict(zip(names, bucket.gradients(), strict=True))
    current = _PendingBucket(gradients, bucket.buffer(), _new_future(bucket.buffer()))
    state.pending.append(current)
    try:
        for name, gradient in current.gradients.items():
            state.compression.add(name, gradient)
    except SmeltError:
        state.compression.reset()
        state.pending.clear()
        raise
    for ready in [other for other in state.pending if all(map(state.compression.is_reduced, other.gradients))]:
        for name, gradient in ready.gradients.items():
            state.compression.write_back(name, gradient)
        ready.future.set_result(ready.buffer)
        state.pending.remove(ready)
    return current.future


def _new_future(buffer: Tensor) -> Future[Tensor]:
    """Return a future for a tensor on the buffer's device; on a GPU a waiter waits in its own stream."""
    return Future(devices=[buffer.device] if buffer.is_cuda else [])


def _all_reduce_plain(compression: BucketedCompression, bucket: distributed.GradBucket) -> Future[Tensor]:
    """All-reduce beside backward, as DDP does without a hook."""
    assert isinstance(compression, AutoCompression)
    if bucket.is_last():
        compression.record_external_step()
    buffer = bucket.buffer().div_(compression.comm.world_size)
    work = distributed.all_reduce(buffer, group=compression.comm.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _trainable_parameters(model: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    ignored = set(model.parameters_to_ignore)
    named = model.module.named_parameters()
    return [(name, parameter) for name, parameter in named if parameter.requires_grad and name not in ignored]
