"""Calibration block by block: the inputs of one block for all batches, carried from block to block.

Only one block's activations live at a time. They lie in memory, or, past a limit the user sets, in one file on disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.compression.calibration.device import moved
from smelt.files import explain_disk_errors
from smelt.models.anatomy import Anatomy, Block

Batch = dict[str, Tensor]


class Activations:
    """One tensor a batch. `limit` is the number of bytes that may stay in memory; what exceeds it lies in a file."""

    def __init__(self, limit: int | None = None, folder: Path | None = None) -> None:
        self._limit, self._folder = limit, folder
        self._held: dict[int, Tensor] = {}
        self._filed: dict[int, _Filed] = {}
        self._files: Any = None
        self.bytes_in_memory = 0

    def __len__(self) -> int:
        return len(self._held) + len(self._filed)

    def __getitem__(self, batch: int) -> Tensor:
        if batch in self._held:
            return self._held[batch]
        place = self._filed[batch]
        raw = np.fromfile(place.path, dtype=np.uint8).reshape(place.shape)
        return torch.from_numpy(raw).view(place.dtype).to(place.device)

    def __setitem__(self, batch: int, tensor: Tensor) -> None:
        if batch in self._filed:
            self._file(batch, tensor)
            return
        size = tensor.numel() * tensor.element_size()
        if batch in self._held:
            self.bytes_in_memory -= self._held[batch].numel() * self._held[batch].element_size()
        elif self._limit is not None and self.bytes_in_memory + size > self._limit:
            self._file(batch, tensor)
            return
        self._held[batch] = tensor
        self.bytes_in_memory += size

    def _file(self, batch: int, tensor: Tensor) -> None:
        if self._files is None:
            self._files = tempfile.TemporaryDirectory(prefix="activations-", dir=self._folder)
        raw, path = _raw(tensor), Path(self._files.name) / f"{batch}.raw"
        with explain_disk_errors(path):  # written and not mapped: a full disk under a mapped file would end the process
            path.write_bytes(raw.tobytes())
        self._filed[batch] = _Filed(path, raw.shape, tensor.dtype, tensor.device)


@dataclass(frozen=True)
class _Filed:
    """Where a tensor lies, and what it is."""

    path: Path
    shape: tuple[int, ...]  # of its bytes
    dtype: torch.dtype
    device: torch.device


def _raw(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor, its last dimension spelled out in bytes."""
    raw: np.ndarray = tensor.detach().contiguous().cpu().view(torch.uint8).numpy()
    return raw


@dataclass(frozen=True)
class Call:
    """How the network calls a block on one batch, apart from the hidden states, which always come first."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Stream:
    """The hidden states that enter the current block, for all batches, and how to call each block on them."""

    def __init__(self, hidden: Activations, calls: list[list[Call]], masks: list[Tensor | None]) -> None:
        self.hidden = hidden
        self.masks = masks  # of real tokens, a batch: [batch, tokens]; None where every position counts
        self._calls = calls

    def __len__(self) -> int:
        return len(self.masks)

    def run(self, block: nn.Module, index: int, batch: int) -> Tensor:
        """The output of a block (at this place in the network) on its current input."""
        call = self._calls[batch][min(index, len(self._calls[batch]) - 1)]
        output = block(self.hidden[batch], *call.args, **call.kwargs)
        return output[0] if isinstance(output, tuple) else output

    def copy(self, limit: int | None = None, folder: Path | None = None) -> Stream:
        """A second stream that starts from the same hidden states."""
        hidden = Activations(limit, folder)
        for batch in range(len(self)):
            hidden[batch] = self.hidden[batch]
        return Stream(hidden, self._calls, self.masks)


class _Reached(Exception):
    """The forward got to the part that was asked for; what follows is not needed."""


@torch.no_grad()
def open_stream(
    anatomy: Anatomy,
    batches: Sequence[Batch],
    *,
    limit: int | None = None,
    folder: Path | None = None,
    device: torch.device | None = None,
) -> Stream:
    """Run only what comes before the first block, and note how the network calls each of them.

    `device` is where the blocks will run, if that is not where the network is."""
    home = next(anatomy.network.parameters()).device
    hidden, calls, masks = Activations(limit, folder), [], []
    for position, batch in enumerate(batches):
        inputs = {name: tensor.to(home) for name, tensor in batch.items() if name != "labels"}
        first, batch_calls = moved(_record(anatomy, inputs), device or home)
        hidden[position] = first
        calls.append(batch_calls)
        mask = moved(inputs.get("attention_mask"), device or home)
        masks.append(None if mask is None or bool(mask.all()) else mask.bool())
    return Stream(hidden, calls, masks)


def _record(anatomy: Anatomy, inputs: Batch) -> tuple[Tensor, list[Call]]:
    """The first block's input, and every block's other arguments, by letting blocks hand their input straight on."""
    seen: list[Tensor] = []
    calls: list[Call] = []
    sequential = all(part.kind != "channels" for part in anatomy.parts)

    def pass_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(hidden_states)
        calls.append(Call(args, kwargs))
        if not sequential or len(calls) == len(anatomy.blocks):
            raise _Reached
        return (hidden_states,) if anatomy.family.returns_tuple else hidden_states

    options = {"use_cache": False} if hasattr(anatomy.network.config, "use_cache") else {}
    with _replaced_forward([block.module for block in anatomy.blocks], pass_on), suppress(_Reached):
        anatomy.network.base_model(**inputs, **options)
    return seen[0], calls


@contextmanager
def _replaced_forward(modules: Sequence[nn.Module], forward: Any) -> Iterator[None]:
    for module in modules:
        module.forward = forward
    try:
        yield
    finally:
        for module in modules:
            del module.forward


@contextmanager
def watching(module: nn.Module, seen: dict[str, Tensor], *, stop: bool = False) -> Iterator[None]:
    """Put what enters and leaves a module into `seen`; with `stop`, a forward ends as soon as it gets to the module."""

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen["input"] = args[0]
        if stop:
            raise _Reached

    def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen["output"] = output

    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def advance(stream: Stream, block: Block) -> None:
    """Carry every batch through a block."""
    for batch in range(len(stream)):
        stream.hidden[batch] = stream.run(block.module, block.index, batch)
