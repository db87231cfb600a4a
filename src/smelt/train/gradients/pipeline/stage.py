"""Compressed gradients between the replicas of one pipeline stage, layer by layer during backward.

Every layer is a bucket with its own residual. When the last micro-batch has contributed to all gradients of a layer
(post-accumulate hooks), the layer is passed to a thread, which reduces it with the other replicas while backward
continues with the layers before it; on a GPU on a stream of its own. `finish` waits for pending reductions. Layers are
reduced from last to first, in this order on every replica, whatever the order in which their gradients arrive. The
thread has its own process group, so that nothing can come between its collectives.

Works with the schedules of `torch.distributed.pipelining` and with plain gradient accumulation. A schedule that
computes weight gradients apart from backward (zero bubble) calls no hooks: its layers are sent by `finish`.

The layer-overlapped form is our design after a name without a paper (see `slack.py`). It would have one threshold per
stage; here each layer has its own controller, with k = d G of the layer, so that every compressor works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from smelt.errors import ConfigError
from smelt.train.gradients.bucket import GradientBucket
from smelt.train.gradients.comm import Comm, new_subgroup
from smelt.train.gradients.compression import GradientCompression, NamedParameter, build_reducer
from smelt.train.gradients.compressor import Compressor, Sparsifier
from smelt.train.gradients.compressors import create_compressor
from smelt.train.gradients.dense import Dense
from smelt.train.gradients.deprecated import renamed_parameter
from smelt.train.gradients.layers import find_layers
from smelt.train.gradients.layout import BucketLayout
from smelt.train.gradients.pipeline.slack import DENSE
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import CompressionSettings


@renamed_parameter("whole", "dense_parameters")
def compress_stage(
    module: nn.Module,
    compressor: Compressor | str,
    group: distributed.ProcessGroup,
    settings: CompressionSettings | None = None,
    *,
    microbatches: int,
    densities: Sequence[float] | None = None,
    stage: int = 0,
    dense_parameters: Sequence[str] = (),
    scale_grads: bool = True,
    optimizer: torch.optim.Optimizer | None = None,
) -> StageCompression:
    """Compress the gradients that the replicas of a pipeline stage exchange, from the next backward on.

    `group`: the ranks that hold this stage, one per replica; all take the parameters of the first. `microbatches`,
    `scale_grads`: as the schedule has them (gradients divided by the number of micro-batches at its end). `densities`:
    of all stages, as `densities_from_slack` returns them, and which of them is `stage`; 1 sends everything.
    `dense_parameters`: names of parameters that another stage holds too (tied embeddings) and that are sent dense, so
    that both copies can be added up afterwards. `optimizer`: checked against the compressor's own momentum. Call
    `finish()` after every step of the schedule.
    """
    if isinstance(compressor, str):
        compressor = create_compressor(compressor)
    if microbatches < 1:
        raise ConfigError(f"microbatches is {microbatches}; pass the number that the schedule splits a batch into.")
    if settings is not None and settings.ranks_per_node is not None:
        raise ConfigError("the replicas of a stage have no node hierarchy; leave ranks_per_node at None.")
    compressor.check_optimizer(optimizer)
    if densities is not None:
        compressor = _with_density(compressor, densities, stage)
    settings = settings or CompressionSettings()
    return StageCompression(module, compressor, group, settings, microbatches, dense_parameters, scale_grads)


class StageCompression(GradientCompression):
    """What `compress_stage` returns. `smelt.train.gradients.checkpoint` saves it, each stage in its own folder."""

    def __init__(
        self,
        module: nn.Module,
        compressor: Compressor,
        group: distributed.ProcessGroup,
        settings: CompressionSettings,
        microbatches: int,
        dense_parameters: Sequence[str],
        scale_grads: bool,
    ) -> None:
        self.compressor, self.settings, self.microbatches = compressor, settings, microbatches
        self.comm = Comm(group)
        self._divisor = microbatches if scale_grads else 1
        self._parameters = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
        _require_parameters(dense_parameters, self._parameters)
        for tensor in (*module.parameters(), *module.buffers()):
            distributed.broadcast(tensor.detach(), group=group, group_src=0)
        own = Comm(new_subgroup(distributed.get_process_group_ranks(group), group))
        self.buckets: list[GradientBucket] = []  # the last layer first
        for named in _group_by_layer(module, dense_parameters):
            method: Compressor = Dense() if named[0][0] in dense_parameters else compressor
            layout, device = BucketLayout.from_tensors(named), named[0][1].device
            compatible = replace(settings, fixed_capacity=None) if isinstance(method, Dense) else settings
            self.buckets.append(GradientBucket(device, layout, build_reducer(method, layout, own, compatible, device)))
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self._num_backwards: Counter[str] = Counter()  # micro-batches whose gradients were accumulated, by parameter
        self._pending: list[Future[None]] = []
        self._executor = ThreadPoolExecutor(1, "gradients")
        device = self.buckets[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._on_accumulated, name))

    @property
    def reducers(self) -> list[Reducer]:
        return [bucket.reducer for bucket in self.buckets]

    def finish(self) -> None:
        """Wait until every gradient is the mean over all replicas; call it between schedule and optimizer step.

        An error, such as gradients that are not finite, ends all replicas of the stage here, not in the thread.
        """
        try:
            self._require_all_microbatches(max(self._num_backwards.values(), default=0))
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    if name not in self._bucket_of[name].received:  # a schedule has scaled it by now
                        self._add(name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                for reduction in self._pending:
                    reduction.result()
                if self._stream is not None:
                    torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
                for name, parameter in self._parameters.items():
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    self._bucket_of[name].write_back(name, parameter.grad)
        finally:
            self._num_backwards.clear()
            self._pending.clear()
            for bucket in self.buckets:
                bucket.reset()

    def _on_accumulated(self, name: str, parameter: Tensor) -> None:
        """Take a gradient once the last micro-batch has been accumulated into it."""
        self._num_backwards[name] += 1
        if self._num_backwards[name] > self.microbatches:
            self._require_all_microbatches(self._num_backwards[name])
        if self._num_backwards[name] == self.microbatches:
            assert parameter.grad is not None
            with torch.no_grad():
                self._add(name, parameter.grad / self._divisor)

    def _add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient and launch the buckets that are complete now, in the order that all replicas keep."""
        self._bucket_of[name].add(name, gradient)
        while len(self._pending) < len(self.buckets):
            bucket = self.buckets[len(self._pending)]
            if not bucket.complete:
                break
            copied = None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()
            self._pending.append(self._executor.submit(self._reduce, bucket, copied))

    def _reduce(self, bucket: GradientBucket, copied: torch.cuda.Event | None) -> None:
        """Reduce in the thread. `copied`: the event after which the gradients are in the bucket."""
        if self._stream is None:
            bucket.reduce(None, track_unused=False)
            return
        with torch.cuda.stream(self._stream):
            assert copied is not None
            self._stream.wait_event(copied)
            bucket.reduce(None, track_unused=False)

    def _require_all_microbatches(self, count: int) -> None:
        if count not in (0, self.microbatches):
            raise ConfigError(
                f"{count} backward passes ran in a step of {self.microbatches} micro-batches; pass microbatches as the "
                "schedule has them, and call finish() after every step."
            )


def _group_by_layer(module: nn.Module, dense_parameters: Sequence[str]) -> list[list[NamedParameter]]:
    """Group trainable parameters by layer, the last layer first; each dense parameter is a group of its own.

    Parameters outside all layers come last: when their gradients are ready is not known, and nothing should wait.
    """
    trainable = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
    groups: list[list[NamedParameter]] = []
    for layer in (*reversed(find_layers(module).values()), module):
        own = [(trainable.pop(parameter), parameter) for parameter in layer.parameters() if parameter in trainable]
        groups.append([named for named in own if named[0] not in dense_parameters])
        groups += [[named] for named in own if named[0] in dense_parameters]
    groups = [group for group in groups if group]
    if not groups:
        raise ConfigError("there is no gradient to compress; the stage has no trainable parameter.")
    return groups


def _with_density(compressor: Compressor, densities: Sequence[float], stage: int) -> Compressor:
    if not 0 <= stage < len(densities):
        raise ConfigError(f"there is no density for stage {stage}; {len(densities)} were passed.")
    if not isinstance(compressor, Sparsifier):
        raise ConfigError(f"{compressor.name} has no density; leave densities out, or use a sparsifier such as micro.")
    with_density = replace(compressor, density=densities[stage])
    return Dense() if densities[stage] == DENSE else with_density


def _require_parameters(names: Sequence[str], parameters: dict[str, nn.Parameter]) -> None:
    for name in names:
        if name not in parameters:
            raise ConfigError(f"the stage has no trainable parameter {name!r}; it has {', '.join(parameters)}.")
