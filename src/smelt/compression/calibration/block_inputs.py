"""Block-by-block calibration: the inputs of one block for all batches, advanced from block to block.

Only one block's activations exist at a time: in memory, or beyond the user's limit in files on disk.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smelt.files import explain_disk_errors
from smelt.models.anatomy import Anatomy, Block

Batch = dict[str, Tensor]


class ActivationStore:
    """One tensor per batch. Beyond `limit` bytes in memory, tensors are written to files in `folder`."""

    def __init__(self, limit: int | None = None, folder: Path | None = None) -> None:
        self._limit, self._folder = limit, folder
        self._in_memory: dict[int, Tensor] = {}
        self._on_disk: dict[int, _StoredTensor] = {}
        self._files: Any = None
        self.bytes_in_memory = 0

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._on_disk)

    def __getitem__(self, batch: int) -> Tensor:
        if batch in self._in_memory:
            return self._in_memory[batch]
        stored = self._on_disk[batch]
        raw = np.fromfile(stored.path, dtype=np.uint8).reshape(stored.shape)
        return torch.from_numpy(raw).view(stored.dtype).to(stored.device)

    def __setitem__(self, batch: int, tensor: Tensor) -> None:
        if batch in self._on_disk:
            self._write(batch, tensor)
            return
        size = tensor.numel() * tensor.element_size()
        if batch in self._in_memory:
            self.bytes_in_memory -= self._in_memory[batch].numel() * self._in_memory[batch].element_size()
        elif self._limit is not None and self.bytes_in_memory + size > self._limit:
            self._write(batch, tensor)
            return
        self._in_memory[batch] = tensor
        self.bytes_in_memory += size

    def _write(self, batch: int, tensor: Tensor) -> None:
        if self._files is None:
            self._files = tempfile.TemporaryDirectory(prefix="activations-", dir=self._folder)
        raw, path = _as_bytes(tensor), Path(self._files.name) / f"{batch}.raw"
        with explain_disk_errors(path):  # not memory-mapped: a full disk would then kill the process
            path.write_bytes(raw.tobytes())
        self._on_disk[batch] = _StoredTensor(path, raw.shape, tensor.dtype, tensor.device)


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]  # of its bytes
    dtype: torch.dtype
    device: torch.device


def _as_bytes(tensor: Tensor) -> np.ndarray:
    """View a tensor as bytes, its last dimension in bytes."""
    raw: np.ndarray = tensor.detach().contiguous().cpu().view(torch.uint8).numpy()
    return raw


@dataclass(frozen=True)
class _BlockCall:
    """The arguments of a block on one batch, except the hidden states, which always come first."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class BlockInputs:
    """The hidden states that enter the current block, for all batches, and the other arguments of each block."""

    def __init__(self, hidden: ActivationStore, calls: list[list[_BlockCall]], masks: list[Tensor | None]) -> None:
        self.hidden = hidden
        self.masks = masks  # of unpadded tokens, one per batch: [batch, tokens]; None: no padding
        self._calls = calls

    def __len__(self) -> int:
        return len(self.masks)

    def run(self, block: nn.Module, index: int, batch: int) -> Tensor:
        """Return the output of a block (at this index of the network) on the current input."""
        call = self._calls[batch][min(index, len(self._calls[batch]) - 1)]
        output = block(self.hidden[batch], *call.args, **call.kwargs)
        return output[0] if isinstance(output, tuple) else output

    def copy(self, limit: int | None = None, folder: Path | None = None) -> BlockInputs:
        """Copy the hidden states; both copies share the other arguments."""
        hidden = ActivationStore(limit, folder)
        for batch in range(len(self)):
            hidden[batch] = self.hidden[batch]
        return BlockInputs(hidden, self._calls, self.masks)


class StopForward(Exception):
    """Raised where the forward pass need not continue."""


@torch.no_grad()
def capture_block_inputs(
    anatomy: Anatomy,
    batches: Sequence[Batch],
    *,
    limit: int | None = None,
    folder: Path | None = None,
    device: torch.device | None = None,
) -> BlockInputs:
    """Run the network up to the first block, and record how it calls each block.

    `device` is where the blocks will run, if not where the network is.
    """
    network_device = next(anatomy.network.parameters()).device
    hidden, calls, masks = ActivationStore(limit, folder), [], []
    for position, batch in enumerate(batches):
        inputs = {name: tensor.to(network_device) for name, tensor in batch.items() if name != "labels"}
        first, batch_calls = move_to(_record(anatomy, inputs), device or network_device)
        hidden[position] = first
        calls.append(batch_calls)
        mask = move_to(inputs.get("attention_mask"), device or network_device)
        masks.append(None if mask is None or bool(mask.all()) else mask.bool())
    return BlockInputs(hidden, calls, masks)


def _record(anatomy: Anatomy, inputs: Batch) -> tuple[Tensor, list[_BlockCall]]:
    """Return the first block's input and every block's other arguments; blocks return their input unchanged."""
    first_inputs: list[Tensor] = []
    calls: list[_BlockCall] = []
    sequential = all(part.kind != "channels" for part in anatomy.parts)

    def record_call(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        first_inputs.append(hidden_states)
        calls.append(_BlockCall(args, kwargs))
        if not sequential or len(calls) == len(anatomy.blocks):
            raise StopForward
        return (hidden_states,) if anatomy.family.returns_tuple else hidden_states

    options = {"use_cache": False} if hasattr(anatomy.network.config, "use_cache") else {}
    with _replaced_forward([block.module for block in anatomy.blocks], record_call), suppress(StopForward):
        anatomy.network.base_model(**inputs, **options)
    return first_inputs[0], calls


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
def record_io(module: nn.Module, recorded: dict[str, Tensor], *, stop: bool = False) -> Iterator[None]:
    """Record the input and output of a module in `recorded`; with `stop`, end the forward pass at the module."""

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        recorded["input"] = args[0]
        if stop:
            raise StopForward

    def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        recorded["output"] = output

    hooks = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    except StopForward:
        pass
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def advance(block_inputs: BlockInputs, block: Block) -> None:
    """Run every batch through a block: its outputs become the inputs of the next one."""
    for batch in range(len(block_inputs)):
        block_inputs.hidden[batch] = block_inputs.run(block.module, block.index, batch)


@contextmanager
def on_device(module: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Move a module to a device inside the context, and back afterwards; None: leave it."""
    original_device = next(module.parameters()).device
    if device is None or device == original_device:
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(original_device)


def move_to(value: Any, device: torch.device) -> Any:
    """Move a tensor, or a structure of tensors, to a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: move_to(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(move_to(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: move_to(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        )
    return value
