"""Where modules begin and end forward and backward: hooks, and moments on the clock of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smelt.train.fsdp.timeline import BACKWARD, FORWARD

Note = Callable[[str, bool], None]  # what, and whether it begins


def watch(members: Sequence[nn.Module], note: Note) -> list[RemovableHandle]:
    """Tell of modules that are called one after the other; several beginnings or ends of one thing may be told.

    Our hooks stand behind those that `fully_shard` has put before forward and backward, and before those behind them:
    what is told is computing, without the collectives. Whose inputs have no gradient tells of no end of backward.
    """

    def entering(_: nn.Module, arguments: Any, options: Any) -> None:
        for tensor in _tensors((arguments, options)):
            tensor.register_hook(lambda _: note(BACKWARD, False))
        note(FORWARD, True)

    def leaving(_: nn.Module, __: Any, ___: Any) -> None:
        note(FORWARD, False)

    def left(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in _tensors(output):
            tensor.register_hook(lambda _: note(BACKWARD, True))

    return [
        members[0].register_forward_pre_hook(entering, with_kwargs=True),
        members[-1].register_forward_hook(leaving, prepend=True),
        members[-1].register_forward_hook(left),
    ]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those with a gradient, however they are packed."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


class Clock:
    """Moments in the order of the current stream of a device, read as seconds when all is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = self.now()

    def now(self) -> Any:
        return self._event() if self._device.type == "cuda" else perf_counter()

    def seconds(self, moment: Any) -> float:
        """Since the clock was made."""
        if self._device.type == "cuda":
            moment.synchronize()
            return float(self._zero.elapsed_time(moment)) / 1000
        return float(moment - self._zero)

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
