"""Hooks that report when modules begin and end forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smelt.train.fsdp.timeline import BACKWARD, FORWARD

Callback = Callable[[str, bool], None]  # the operation, and whether it begins


def add_hooks(modules: Sequence[nn.Module], callback: Callback) -> list[RemovableHandle]:
    """Report forward and backward of modules that are called in sequence; begin and end may be reported repeatedly.

    The hooks run after those that `fully_shard` registers before forward and backward, and before those it registers
    after them: the reported span is compute, without collectives. No end of backward is reported for modules whose
    inputs have no gradient.
    """

    def before_forward(_: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _tensors((args, kwargs)):
            tensor.register_hook(lambda _: callback(BACKWARD, False))
        callback(FORWARD, True)

    def after_forward(_: nn.Module, __: Any, ___: Any) -> None:
        callback(FORWARD, False)

    def hook_outputs(_: nn.Module, __: Any, output: Any) -> None:
        for tensor in _tensors(output):
            tensor.register_hook(lambda _: callback(BACKWARD, True))

    return [
        modules[0].register_forward_pre_hook(before_forward, with_kwargs=True),
        modules[-1].register_forward_hook(after_forward, prepend=True),
        modules[-1].register_forward_hook(hook_outputs),
    ]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that require a gradient from nested containers."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
