"""All that a run needs to go on to the bit: `checkpoints/step-N/`, whole or absent, the newest few kept.

Weights and the optimiser's state are safetensors of the first worker, as all workers hold the same; what each worker
has not sent yet is a file of its own (`smelt.train.gradients.state`); the rest is JSON.
torch.distributed.checkpoint is not used: it writes its metadata as a pickle, which runs code when it is read.

Nothing random is stored: random numbers are drawn anew in every pass from the seed, the sample and the worker.
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
from smelt.train.gradients import state
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compression import Compression

MODEL, OPTIMIZER, GRADIENTS, POSITION = "model.safetensors", "optimizer.safetensors", "gradients", "position.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass
class TrainProgress:
    """How far a run has come."""

    step: int = 0  # that were done
    samples: int = 0  # that all workers together have seen
    seconds: float = 0.0  # of training, over all processes that had a part in it
    bytes: float = 0.0  # that arrived at a worker, mean over workers
    skipped: int = 0  # steps that the gradient scaler left out
    workers: int = 1
    scaler: dict[str, Any] | None = None


@dataclass
class TrainState:
    """What a checkpoint is made of."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    compression: Compression | None
    position: TrainProgress


def newest(folder: Path) -> Path | None:
    return max(_all(folder), key=_step, default=None)


def resume_hint(folder: Path) -> str:
    """What a user can do after a run has stopped whose checkpoints lie in `folder`."""
    place = newest(folder)
    where = "from the start, as there is no checkpoint yet" if place is None else f"from {place.name}"
    return f"--resume goes on {where}."


def clear_unfinished(folder: Path) -> None:
    """Make the folder, or remove what a process that was killed in the middle of its writing left in it."""
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def save(parts: TrainState, folder: Path, keep: int, workers: Workers) -> None:
    """Write step-N below `folder`, which all workers see; they go on when it has its name."""
    place = folder / f"step-{parts.position.step}"
    partial = folder / f".{place.name}.partial"
    lead = workers.rank == 0
    if lead:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
    _wait(workers)
    state.together(
        workers, lambda: _write(parts, partial, lead), f"another worker could not write its part of {place}."
    )
    if lead:
        with explain_disk_errors(place):
            partial.rename(place)
            _forget_old(folder, keep)
    _wait(workers)


def load(parts: TrainState, place: Path, workers: Workers, *, resplit: bool) -> None:
    """Go on from a checkpoint; `resplit` allows another number of workers."""
    state.together(workers, lambda: _read(parts, place, resplit, workers.size), "another worker could not read it.")
    if parts.compression is not None:
        state.load(parts.compression, place / GRADIENTS, resplit=resplit)
    parts.position.workers = workers.size


def _write(parts: TrainState, folder: Path, lead: bool) -> None:
    if parts.compression is not None:
        state.write(parts.compression, folder / GRADIENTS)
    if not lead:
        return
    _write_tensors(folder / MODEL, _weights(parts.network))
    _write_tensors(folder / OPTIMIZER, _memories(parts))
    position = {**asdict(parts.position), "scaler": None if parts.scaler is None else parts.scaler.state_dict()}
    write_atomically(folder / POSITION, lambda path: path.write_text(json.dumps(position, indent=1)))


def _read(parts: TrainState, place: Path, resplit: bool, workers: int) -> None:
    found = _position(place)
    if found.workers != workers and not resplit:
        raise ConfigError(
            f"{place} was written by {found.workers} workers and there are {workers}; start as many, or give "
            "--resplit to share out what they had not sent."
        )
    _copy_all(_read_tensors(place / MODEL), _weights(parts.network), place / MODEL)
    memories = _read_tensors(place / OPTIMIZER)
    named = dict(parts.network.named_parameters())
    for key, tensor in memories.items():
        name, _, kind = key.rpartition("/")
        if name not in named:
            raise DataError(f"{place / OPTIMIZER} has {name}, which the model has not; give the folder of this run.")
        on_host = kind == "step" and not parts.optimizer.defaults["fused"]  # where PyTorch counts steps
        parts.optimizer.state[named[name]][kind] = tensor if on_host else tensor.to(named[name].device)
    if parts.scaler is not None and found.scaler is not None:
        parts.scaler.load_state_dict(found.scaler)
    for key, value in asdict(found).items():
        setattr(parts.position, key, value)


def _weights(network: nn.Module) -> dict[str, Tensor]:
    """Parameters, what is tied once, and buffers that are kept."""
    kept = network.state_dict()
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in kept}
    return {**{name: parameter.detach() for name, parameter in network.named_parameters()}, **buffers}


def _memories(parts: TrainState) -> dict[str, Tensor]:
    """What the optimiser remembers of each parameter."""
    named = ((name, parts.optimizer.state.get(parameter, {})) for name, parameter in parts.network.named_parameters())
    return {
        f"{name}/{kind}": value for name, memory in named for kind, value in memory.items() if isinstance(value, Tensor)
    }


def _copy_all(found: dict[str, Tensor], into: dict[str, Tensor], path: Path) -> None:
    for name, tensor in into.items():
        if name not in found or found[name].shape != tensor.shape:
            raise DataError(f"{path} lacks {name} in the shape of this model; give the folder of this run.")
        tensor.copy_(found[name])


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, lambda temporary: save_file(plain, temporary))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise _broken(path, error) from error


def _position(place: Path) -> TrainProgress:
    try:
        return TrainProgress(**json.loads((place / POSITION).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _broken(place / POSITION, error) from error


def _broken(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read ({error}); remove {path.parent} to go on from the checkpoint before it.")


def _forget_old(folder: Path, keep: int) -> None:
    for old in sorted(_all(folder), key=_step)[:-keep]:
        leaving = folder / f".{old.name}.old"  # so that a half-removed folder has no checkpoint's name
        old.rename(leaving)
        shutil.rmtree(leaving)


def _all(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if _NAME.fullmatch(each.name)] if folder.is_dir() else []


def _step(place: Path) -> int:
    found = _NAME.fullmatch(place.name)
    assert found is not None
    return int(found[1])


def _wait(workers: Workers) -> None:
    workers.gather(torch.zeros(1), "agreement")
