"""Compressed gradients of one pipeline stage, between its replicas, layer by layer while backward goes on.

Every layer is a vector with a memory of its own. When the last micro-batch has added its part to all gradients of a
layer (post-accumulate hooks), the layer is handed to a thread, which reduces it with the same layer of the other
replicas while backward goes on with the layers before it; on a GPU on a stream of its own. `finish` waits for what is
under way. Layers are reduced from the last to the first, on every replica in this order, whatever the order in which
their gradients come. The thread has a process group to itself, so that nothing can come between its collectives.

Works with the schedules of `torch.distributed.pipelining` and with plain accumulation of gradients. A schedule that
computes gradients of weights apart from backward (zero bubble) calls no hooks: its layers are sent by `finish`.

The layer-overlapped form is our design after a name without a paper (see `slack.py`). It would have one threshold a
stage; here each layer has its own controller, with k = d G of the layer, so that every compressor fits.
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
from smelt.train.gradients.bucket import Vector
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compression import Compressed, Named, reducer_of
from smelt.train.gradients.compressor import Compressor, Sparsifier
from smelt.train.gradients.compressors import compressor_named
from smelt.train.gradients.dense import Dense
from smelt.train.gradients.groups import part_of_group
from smelt.train.gradients.layers import layers_of
from smelt.train.gradients.layout import Layout
from smelt.train.gradients.pipeline.slack import WHOLE
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import Settings


def compress_stage(
    module: nn.Module,
    compressor: Compressor | str,
    group: distributed.ProcessGroup,
    settings: Settings | None = None,
    *,
    microbatches: int,
    densities: Sequence[float] | None = None,
    stage: int = 0,
    whole: Sequence[str] = (),
    scale_grads: bool = True,
) -> StageCompression:
    """From the next backward on the replicas of a stage send each other only what the compressor chooses.

    `group`: the workers that hold this stage, one of each replica; all take the parameters of the first.
    `microbatches`, `scale_grads`: as the schedule has them (gradients divided by the number of micro-batches at its
    end). `densities`: of all stages, as `densities_from_slack` gives them, and which of them is `stage`; one of 1 sends
    whole vectors. `whole`: names of parameters that another stage holds too (tied embeddings) and that are sent whole,
    so that both copies can be added up afterwards. After every step of the schedule call `finish()`.
    """
    if isinstance(compressor, str):
        compressor = compressor_named(compressor)
    if microbatches < 1:
        raise ConfigError(f"microbatches is {microbatches}; give the number that the schedule cuts a batch into.")
    if settings is not None and settings.node is not None:
        raise ConfigError("replicas of a stage are reduced between all of them; leave node at None.")
    if densities is not None:
        compressor = _at_density(compressor, densities, stage)
    return StageCompression(module, compressor, group, settings or Settings(), microbatches, whole, scale_grads)


class StageCompression(Compressed):
    """What `compress_stage` gives back. `smelt.train.gradients.state` saves it, each stage into a folder of its own."""

    def __init__(
        self,
        module: nn.Module,
        compressor: Compressor,
        group: distributed.ProcessGroup,
        settings: Settings,
        microbatches: int,
        whole: Sequence[str],
        scale_grads: bool,
    ) -> None:
        self.compressor, self.settings, self.microbatches = compressor, settings, microbatches
        self.workers = Workers(group)
        self._divisor = microbatches if scale_grads else 1
        self._parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
        _require_known(whole, self._parameters)
        for tensor in (*module.parameters(), *module.buffers()):
            distributed.broadcast(tensor.detach(), group=group, group_src=0)
        own = Workers(part_of_group(distributed.get_process_group_ranks(group), group))
        self.vectors: list[Vector] = []  # the last layer first
        for named in _layers(module, whole):
            kind: Compressor = Dense() if named[0][0] in whole else compressor
            layout, device = Layout.of(named), named[0][1].device
            fitting = replace(settings, slots=None) if isinstance(kind, Dense) else settings
            self.vectors.append(Vector(device, layout, reducer_of(kind, layout, own, fitting, device)))
        self._home = {name: vector for vector in self.vectors for name in vector.names}
        self._passes: Counter[str] = Counter()  # micro-batches whose gradients have come
        self._under_way: list[Future[None]] = []
        self._thread = ThreadPoolExecutor(1, "gradients")
        device = self.vectors[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))

    @property
    def reducers(self) -> list[Reducer]:
        return [vector.reducer for vector in self.vectors]

    def finish(self) -> None:
        """Wait until every gradient is the mean over all replicas; between the schedule's step and the optimiser's.

        An error, such as gradients that are not finite, ends all replicas of the stage here, not in the thread.
        """
        try:
            self._require_passes(max(self._passes.values(), default=0))
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    if name not in self._home[name].arrived:  # a schedule has scaled it by now
                        self._put(name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                for reduced in self._under_way:
                    reduced.result()
                if self._stream is not None:
                    torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
                for name, parameter in self._parameters.items():
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    self._home[name].give(name, parameter.grad)
        finally:
            self._passes.clear()
            self._under_way.clear()
            for vector in self.vectors:
                vector.clear()

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """A backward has added to a gradient; if it was that of the last micro-batch, the gradient is final."""
        self._passes[name] += 1
        if self._passes[name] > self.microbatches:
            self._require_passes(self._passes[name])
        if self._passes[name] == self.microbatches:
            assert parameter.grad is not None
            with torch.no_grad():
                self._put(name, parameter.grad / self._divisor)

    def _put(self, name: str, gradient: Tensor) -> None:
        """Take a gradient in and launch what is complete now, in the order that all replicas keep."""
        self._home[name].put(name, gradient)
        while len(self._under_way) < len(self.vectors):
            vector = self.vectors[len(self._under_way)]
            if not vector.complete:
                break
            moment = None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()
            self._under_way.append(self._thread.submit(self._reduce, vector, moment))

    def _reduce(self, vector: Vector, moment: torch.cuda.Event | None) -> None:
        """In the thread. `moment`: when the gradients are in the vector."""
        if self._stream is None:
            vector.reduce(None, watch_unused=False)
            return
        with torch.cuda.stream(self._stream):
            assert moment is not None
            self._stream.wait_event(moment)
            vector.reduce(None, watch_unused=False)

    def _require_passes(self, number: int) -> None:
        if number not in (0, self.microbatches):
            raise ConfigError(
                f"gradients came {number} times in a step of {self.microbatches} micro-batches; give microbatches as "
                "the schedule has them, and call finish() after every step."
            )


def _layers(module: nn.Module, whole: Sequence[str]) -> list[list[Named]]:
    """Trained parameters by layer, the last layer first; what is sent whole stands by itself.

    What no layer holds comes last: when its gradient is ready is not known, and nothing should wait for it.
    """
    trained = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
    groups: list[list[Named]] = []
    for part in (*reversed(layers_of(module).values()), module):
        own = [(trained.pop(parameter), parameter) for parameter in part.parameters() if parameter in trained]
        groups.append([named for named in own if named[0] not in whole])
        groups += [[named] for named in own if named[0] in whole]
    found = [group for group in groups if group]
    if not found:
        raise ConfigError("there is no gradient to compress; the stage has no parameter that is trained.")
    return found


def _at_density(compressor: Compressor, densities: Sequence[float], stage: int) -> Compressor:
    if not 0 <= stage < len(densities):
        raise ConfigError(f"there is no density for stage {stage}; {len(densities)} were given.")
    if not isinstance(compressor, Sparsifier):
        raise ConfigError(f"{compressor.name} has no density; leave densities out, or take a sparsifier such as micro.")
    chosen = replace(compressor, density=densities[stage])
    return Dense() if densities[stage] == WHOLE else chosen


def _require_known(names: Sequence[str], parameters: dict[str, nn.Parameter]) -> None:
    for name in names:
        if name not in parameters:
            raise ConfigError(
                f"the stage has no trained parameter {name!r} to send whole; it has {', '.join(parameters)}."
            )
