"""Block-by-block calibration: the inputs of one block for all batches, advanced from block to block.

Only one block's activations exist at a time: in memory, or beyond the user's limit in files on disk. Where blocks do
not follow one another (an encoder and a decoder, stages of different widths, a shared block), the whole network runs
for each block instead.
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
from transformers import PreTrainedModel

from smelt.errors import DataError, ModelError
from smelt.files import explain_disk_errors
from smelt.models.anatomy import Anatomy, Block
from smelt.models.inputs import complete_inputs

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

    def __init__(
        self, hidden: ActivationStore, calls: list[list[_BlockCall]], masks: list[Tensor | None], tuple_size: int = 0
    ) -> None:
        self.hidden = hidden
        self.masks = masks  # of unpadded tokens, one per batch: [batch, tokens]; None: no padding
        self.tuple_size = tuple_size  # of what a block returns, whose first value is the hidden states; 0: only these
        self._calls = calls

    def __len__(self) -> int:
        return len(self.masks)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return self.hidden[0].dtype

    def check_chain(self, method: str) -> None:
        """Raise if there are no hidden states between blocks, which the method needs."""

    def advance(self, batch: int, output: Tensor) -> None:
        """Take the output of a block as the input of the next one."""
        self.hidden[batch] = output

    def run(self, block: nn.Module, index: int, batch: int, hidden: Tensor | None = None) -> Tensor:
        """Return the output of a block (at this index of the network) on the current input, or on `hidden`."""
        call = self._calls[batch][min(index, len(self._calls[batch]) - 1)]
        output = block(self.hidden[batch] if hidden is None else hidden, *call.args, **call.kwargs)
        return output[0] if isinstance(output, tuple) else output

    def copy(self, limit: int | None = None, folder: Path | None = None) -> BlockInputs:
        """Copy the hidden states; both copies share the other arguments."""
        hidden = ActivationStore(limit, folder)
        for batch in range(len(self)):
            hidden[batch] = self.hidden[batch]
        return BlockInputs(hidden, self._calls, self.masks, self.tuple_size)


class ReplayedInputs(BlockInputs):
    """Run the whole network whenever a block has to run: for networks whose blocks are no chain."""

    def __init__(self, anatomy: Anatomy, batches: Sequence[Batch], masks: list[Tensor | None]) -> None:
        super().__init__(ActivationStore(), [], masks)
        self._anatomy, self._batches = anatomy, batches

    @property
    def dtype(self) -> torch.dtype:
        return self._anatomy.network.dtype

    def check_chain(self, method: str) -> None:
        raise ModelError(
            f"{method} works from block to block, and the blocks of a {self._anatomy.network.config.model_type} "
            "network do not follow one another; use gptq, rtn or hqq."
        )

    def advance(self, batch: int, output: Tensor) -> None:
        """Do nothing: the next run of the network computes it again."""

    def run(self, block: nn.Module, index: int, batch: int, hidden: Tensor | None = None) -> Tensor:
        """Run the network; return the last output of the block."""
        outputs: list[Any] = []
        hook = block.register_forward_hook(lambda _, args, output: outputs.append(output))
        try:
            run_backbone(self._anatomy, self._batches[batch])
        finally:
            hook.remove()
        if not outputs:
            raise DataError(f"{self._anatomy.blocks[index].path} was not reached by the calibration data.")
        output: Tensor = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
        return output


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
    tuple_size = 1 if anatomy.family.returns_tuple else 0
    if anatomy.family.chain is not True:
        is_chain, tuple_size = _inspect_calls(anatomy, batches[0]) if anatomy.family.chain is None else (False, 0)
        if not is_chain:
            return _replayed_inputs(anatomy, batches, device)
    for position, batch in enumerate(batches):
        inputs = {name: tensor.to(network_device) for name, tensor in batch.items() if name != "labels"}
        first, batch_calls = move_to(_record(anatomy, inputs, tuple_size), device or network_device)
        hidden[position] = first
        calls.append(batch_calls)
        mask = move_to(inputs.get("attention_mask"), device or network_device)
        masks.append(None if mask is None or bool(mask.all()) else mask.bool())
    return BlockInputs(hidden, calls, masks, tuple_size)


def _record(anatomy: Anatomy, inputs: Batch, tuple_size: int) -> tuple[Tensor, list[_BlockCall]]:
    """Return the first block's input and every block's other arguments; blocks return their input unchanged.

    With a `tuple_size`, they return it as the first of so many.
    """
    first_inputs: list[Tensor] = []
    calls: list[_BlockCall] = []
    sequential = all(part.kind != "channels" for part in anatomy.parts)

    def record_call(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        first_inputs.append(hidden_states)
        calls.append(_BlockCall(args, kwargs))
        if not sequential or len(calls) == len(anatomy.blocks):
            raise StopForward
        return block_output(hidden_states, tuple_size)

    with replaced_forward([block.module for block in anatomy.blocks], record_call), suppress(StopForward):
        run_backbone(anatomy, inputs)
    return first_inputs[0], calls


def block_output(hidden: Tensor, tuple_size: int) -> Any:
    """Return hidden states as a block of the network would: alone, or as the first of a tuple of this size."""
    return (hidden, *(None,) * (tuple_size - 1)) if tuple_size else hidden


def run_backbone(anatomy: Anatomy, inputs: Batch) -> None:
    """Run the network without its head."""
    anatomy.network.base_model(**forward_arguments(anatomy.network, inputs))


def forward_arguments(network: PreTrainedModel, inputs: Batch) -> dict[str, Any]:
    """Return the arguments that run a network on a batch once: without labels and without a KV cache."""
    device = next(network.parameters()).device
    batch = complete_inputs(network, {name: tensor for name, tensor in inputs.items() if name != "labels"})
    options = {} if getattr(network.config.get_text_config(), "use_cache", None) is None else {"use_cache": False}
    return {**{name: tensor.to(device) for name, tensor in batch.items()}, **options}


def _inspect_calls(anatomy: Anatomy, batch: Batch) -> tuple[bool, int]:
    """Return whether each block gets the hidden states of the one before it, and the size of the tuple that blocks
    return; 0: none."""
    calls: list[tuple[int, Any, Any]] = []  # block, hidden states, output

    def after(index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.append((index, args[0] if args else kwargs.get("hidden_states"), output))

        return hook

    hooks = [block.module.register_forward_hook(after(block.index), with_kwargs=True) for block in anatomy.blocks]
    try:
        run_backbone(anatomy, batch)
    finally:
        for handle in hooks:
            handle.remove()
    outputs = [output[0] if isinstance(output, tuple) else output for _, _, output in calls]
    in_order = [index for index, *_ in calls] == list(range(len(anatomy.blocks)))
    follows = all(hidden is output for (_, hidden, _), output in zip(calls[1:], outputs, strict=False))
    return in_order and follows, max(len(output) if isinstance(output, tuple) else 0 for *_, output in calls)


def _replayed_inputs(anatomy: Anatomy, batches: Sequence[Batch], device: torch.device | None) -> ReplayedInputs:
    network_device = next(anatomy.network.parameters()).device
    if device is not None and device != network_device:
        raise ModelError(
            f"the blocks of a {anatomy.network.config.model_type} network do not follow one another, so they cannot be "
            "moved to the device one at a time; remove --offload."
        )
    masks = [batch.get("attention_mask") for batch in batches]
    used = [None if mask is None or bool(mask.all()) else mask.bool().to(network_device) for mask in masks]
    return ReplayedInputs(anatomy, batches, used)


@contextmanager
def replaced_forward(modules: Sequence[nn.Module], forward: Any) -> Iterator[None]:
    """Call `forward` wherever one of the modules is called inside the context."""
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
        block_inputs.advance(batch, block_inputs.run(block.module, block.index, batch))


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
