"""The weights of carved experts in host memory, with a few of them in slots on the device, for eager steps.

The fused network of a GPU has slots of its own, whose copies are part of a CUDA graph (`runtime/gpu_experts.py`); here
run experts that it does not support, and those on CPU.

A slot holds one expert of a layer, and the same expert is in the same slot in all layers. What a step needs is known
before its first layer, so the copies of all layers begin at once on a stream of their own, in the order in which the
layers run; a layer waits for its own copies only. Without prefetching, a layer copies when it needs an expert. On CPU
both memories are the same and a copy is only that: it shows what a device would do.

Quantized experts are loaded as they are stored; what their kernels prepare is computed again after each load.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smelt.errors import ModelError
from smelt.models.carved_feed_forward import CarvedFeedForward
from smelt.models.quantized import quantized_layers
from smelt.serve.engine.expert_cache import ExpertAccess


class ExpertSlots:
    """Runs the experts of carved layers from slots."""

    def __init__(self, layers: Sequence[CarvedFeedForward], slots: int, device: torch.device, prefetch: bool) -> None:
        self._layers, self._prefetch = layers, prefetch
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots: list[list[nn.Module]] = []  # [layers][slots]
        self._ready: dict[tuple[int, int], Any] = {}  # (layer, slot) -> event of its copy
        self._accesses: dict[int, ExpertAccess] = {}
        self.loaded_bytes = 0
        for index, layer in enumerate(layers):
            _check_equal(layer, index)
            self._slots.append([copy.deepcopy(layer.experts[0]).to(device) for _ in range(slots)])
            for expert in layer.experts:
                _move_to_host(expert, pin=self._stream is not None)
            layer.run_expert = partial(self._run, index)
        self.expert_bytes = sum(tensor.nbytes for layer in layers for tensor in _tensors(layer.experts[0]).values())

    def begin(self, accesses: Sequence[ExpertAccess]) -> None:
        """Prepare a step: set the order of the experts in all layers, and start the copies that can start."""
        self._accesses = {access.expert: access for access in accesses}
        self._ready = {}
        self.loaded_bytes += self.expert_bytes * sum(access.loads for access in accesses)
        for layer in self._layers:
            layer.expert_order = [access.expert for access in accesses]
        if not self._prefetch:
            return
        if self._stream is not None:  # the steps before still use the slots
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for index in range(len(self._layers)):
                for access in accesses:
                    if access.loads and access.early:
                        self._copy(index, access)
                        self._ready[index, access.slot] = None if self._stream is None else self._stream.record_event()

    def _run(self, index: int, expert: int, tokens: Tensor) -> Tensor:
        access = self._accesses[expert]
        if (index, access.slot) in self._ready and access.early:
            if (event := self._ready[index, access.slot]) is not None:
                torch.cuda.current_stream(tokens.device).wait_event(event)
        elif access.loads:
            self._copy(index, access)
        output: Tensor = self._slots[index][access.slot](tokens)
        return output

    @torch.no_grad()
    def _copy(self, index: int, access: ExpertAccess) -> None:
        slot, source = self._slots[index][access.slot], _tensors(self._layers[index].experts[access.expert])
        for name, tensor in _tensors(slot).items():
            tensor.copy_(source[name], non_blocking=True)
        for layer in quantized_layers(slot).values():
            layer.reselect_kernel()


def _tensors(expert: nn.Module) -> dict[str, Tensor]:
    return {**dict(expert.named_parameters()), **dict(expert.named_buffers())}


def _check_equal(layer: CarvedFeedForward, index: int) -> None:
    """Raise if the experts of a layer cannot take turns in one slot."""
    if any(quantized.moved for expert in layer.experts for quantized in quantized_layers(expert).values()):
        raise ModelError("the weights of these experts have no kernel here: serve them without expert slots.")
    kinds = {
        tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in _tensors(expert).items())
        + tuple((name, quantized.scheme) for name, quantized in quantized_layers(expert).items())
        for expert in layer.experts
    }
    if len(kinds) > 1:
        raise ModelError(
            f"the experts of layer {index} differ in size or format, so they share no slots; leave slots out."
        )


def _move_to_host(expert: nn.Module, pin: bool) -> None:
    def host(tensor: Tensor) -> Tensor:
        return tensor.cpu().pin_memory() if pin else tensor.cpu()

    for parameter in expert.parameters():
        parameter.data = host(parameter.data)
    for module in expert.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, host(buffer))
