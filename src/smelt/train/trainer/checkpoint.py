"""Checkpoints that resume bit for bit: `checkpoints/step-N/`, complete or absent, the newest few kept.

Rank 0 writes weights and optimizer state as safetensors, as all ranks hold the same; each rank writes its residuals
to a file of its own (`smelt.train.gradients.checkpoint`); the rest is JSON. torch.distributed.checkpoint is not used:
it writes its metadata as a pickle, which runs code when it is loaded.

No RNG state is stored: every forward pass seeds its random numbers from the run's seed and the position of its samples.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from smelt.errors import ConfigError, DataError
from smelt.files import explain_disk_errors, write_atomically
from smelt.train.gradients import checkpoint as gradient_checkpoint
from smelt.train.gradients.comm import Comm, run_on_all_ranks
from smelt.train.gradients.compression import BucketedCompression

MODEL, OPTIMIZER, GRADIENTS, PROGRESS = "model.safetensors", "optimizer.safetensors", "gradients", "position.json"
_NAME = re.compile(r"step-(\d+)")
_RENAMED = {"workers": "world_size"}  # keys of position.json written by 0.1


@dataclass
class TrainProgress:
    """How far a run has come."""

    step: int = 0  # steps done
    samples: int = 0  # seen by all ranks together
    seconds: float = 0.0  # of training, over all restarts
    bytes: float = 0.0  # that arrived at a rank, mean over ranks
    skipped: int = 0  # steps that the gradient scaler skipped
    world_size: int = 1
    scaler: dict[str, Any] | None = None


@dataclass
class TrainState:
    """What a checkpoint contains."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    compression: BucketedCompression | None
    progress: TrainProgress


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint below a folder."""
    return max(_list(folder), key=_step, default=None)


def resume_hint(folder: Path) -> str:
    """Return the end of a sentence: how to continue a stopped run with checkpoints in `folder`."""
    checkpoint = latest(folder)
    start = "from the start, as there is no checkpoint yet" if checkpoint is None else f"from {checkpoint.name}"
    return f"--resume continues {start}."


def prepare_folder(folder: Path) -> None:
    """Create the folder, and remove incomplete checkpoints that a killed process left."""
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for incomplete in folder.glob(".step-*"):
        shutil.rmtree(incomplete, ignore_errors=True)


def save(train_state: TrainState, folder: Path, keep: int, comm: Comm) -> None:
    """Write step-N below `folder`, which all ranks must see; returns when it is complete."""
    target = folder / f"step-{train_state.progress.step}"
    partial = folder / f".{target.name}.partial"
    is_main = comm.rank == 0
    if is_main:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
    _barrier(comm)
    run_on_all_ranks(
        comm,
        lambda: _write(train_state, partial, is_main),
        f"another rank could not write its part of {target}.",
    )
    if is_main:
        with explain_disk_errors(target):
            partial.rename(target)
            _remove_old(folder, keep)
    _barrier(comm)


def load(train_state: TrainState, checkpoint: Path, comm: Comm, *, resplit: bool) -> None:
    """Restore a run from a checkpoint; `resplit` allows another world size."""
    run_on_all_ranks(
        comm,
        lambda: _read(train_state, checkpoint, resplit, comm.world_size),
        f"another rank could not read {checkpoint}.",
    )
    if train_state.compression is not None:
        gradient_checkpoint.load(train_state.compression, checkpoint / GRADIENTS, resplit=resplit)
    train_state.progress.world_size = comm.world_size


def load_model(network: nn.Module, checkpoint: Path) -> None:
    """Load the weights of a checkpoint, without the rest of the run's state."""
    _copy_tensors(_read_tensors(checkpoint / MODEL), _model_tensors(network), checkpoint / MODEL)


def _write(train_state: TrainState, folder: Path, is_main: bool) -> None:
    if train_state.compression is not None:
        gradient_checkpoint.write(train_state.compression, folder / GRADIENTS)
    if not is_main:
        return
    _write_tensors(folder / MODEL, _model_tensors(train_state.network))
    _write_tensors(folder / OPTIMIZER, _optimizer_tensors(train_state))
    scaler = None if train_state.scaler is None else train_state.scaler.state_dict()
    progress = {**asdict(train_state.progress), "scaler": scaler}
    write_atomically(folder / PROGRESS, lambda path: path.write_text(json.dumps(progress, indent=1)))


def _read(train_state: TrainState, checkpoint: Path, resplit: bool, world_size: int) -> None:
    progress = _read_progress(checkpoint)
    if progress.world_size != world_size and not resplit:
        raise ConfigError(
            f"{checkpoint} was written by {progress.world_size} ranks and there are {world_size}; start as many, or "
            "give --resplit to redistribute the gradients that they had not sent."
        )
    load_model(train_state.network, checkpoint)
    optimizer_tensors = _read_tensors(checkpoint / OPTIMIZER)
    parameters = dict(train_state.network.named_parameters())
    for key, tensor in optimizer_tensors.items():
        name, _, buffer = key.rpartition("/")
        if name not in parameters:
            raise DataError(
                f"{checkpoint / OPTIMIZER} has {name}, which the model does not have; give the folder of this run."
            )
        on_host = buffer == "step" and not train_state.optimizer.defaults["fused"]  # where PyTorch counts steps
        parameter = parameters[name]
        train_state.optimizer.state[parameter][buffer] = tensor if on_host else tensor.to(parameter.device)
    if train_state.scaler is not None and progress.scaler is not None:
        train_state.scaler.load_state_dict(progress.scaler)
    for key, value in asdict(progress).items():
        setattr(train_state.progress, key, value)


def _model_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return parameters, tied ones once, and persistent buffers."""
    persistent = network.state_dict()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in persistent}
    return {**{name: parameter.detach() for name, parameter in network.named_parameters()}, **buffers}


def _optimizer_tensors(train_state: TrainState) -> dict[str, Tensor]:
    """Return the optimizer's state, keyed by parameter name and buffer."""
    optimizer_state = train_state.optimizer.state
    return {
        f"{name}/{buffer}": value
        for name, parameter in train_state.network.named_parameters()
        for buffer, value in optimizer_state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _copy_tensors(source: dict[str, Tensor], target: dict[str, Tensor], path: Path) -> None:
    for name, tensor in target.items():
        if name not in source or source[name].shape != tensor.shape:
            raise DataError(f"{path} has no {name} in the shape of this model; give the folder of this run.")
        tensor.copy_(source[name])


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda temporary: save_file(on_cpu, temporary))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _read_progress(checkpoint: Path) -> TrainProgress:
    path = checkpoint / PROGRESS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return TrainProgress(**{_RENAMED.get(key, key): value for key, value in content.items()})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read ({error}); remove {path.parent} to resume from the checkpoint before it.")


def _remove_old(folder: Path, keep: int) -> None:
    for old in sorted(_list(folder), key=_step)[:-keep]:
        doomed = folder / f".{old.name}.old"  # so that a half-removed folder does not look like a checkpoint
        old.rename(doomed)
        shutil.rmtree(doomed)


def _list(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []


def _step(checkpoint: Path) -> int:
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1])


def _barrier(comm: Comm) -> None:
    comm.all_gather(torch.zeros(1), "agreement")
