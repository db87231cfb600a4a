"""Save and resume residuals and compressor states: one safetensors file per rank, and JSON that describes the run.

With the same world size a run resumes bit-exactly. With another one the residuals are redistributed: the optimizer gets
means, so what is still pending is the mean of all residuals, and every rank starts with that mean. Thresholds are kept;
partitions and counts, which depend on the world size, start anew.

`CompressionState` is the same for torch.distributed.checkpoint, beside the model:

    state = {"model": model.state_dict(), "gradients": CompressionState(compression)}
    checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    checkpoint.load(state, storage_reader=HuggingFaceStorageReader(folder))

These two write and read safetensors; PyTorch's default writes a pickle. It needs the same world size. A tensor is named
after its rank, as no two ranks hold the same, and keeps its shape from the first step on, since PyTorch loads into
existing tensors.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smelt.config import renamed_keys
from smelt.errors import ConfigError, DataError
from smelt.files import check_writable, write_atomically
from smelt.train.gradients.autotune.auto import Auto
from smelt.train.gradients.comm import run_on_all_ranks
from smelt.train.gradients.compression import GradientCompression
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import COMPRESSORS, PowerSGD
from smelt.train.gradients.dense import Dense
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import OLD_ERROR_FEEDBACK, CompressionSettings

METADATA = "gradients.json"
_FORMAT = 2
_VARIABLE_SHAPE = ("counts", "state.partition")
_IDENTITY = "identity"
_NO_COUNT = -1  # before the first step


def save(compression: GradientCompression, folder: Path) -> None:
    """Write a new folder, which all ranks can access; it appears complete or not at all."""
    comm = compression.comm
    run_on_all_ranks(comm, lambda: _require_new(folder), f"{folder} could not be created on another rank.")
    partial = folder.with_name(f".{folder.name}.partial")
    run_on_all_ranks(comm, lambda: write(compression, partial), f"another rank could not write its part of {folder}.")
    if comm.rank == 0:
        partial.rename(folder)
    comm.all_gather(torch.zeros(1), "agreement")  # no rank continues before the folder has its name


def write(compression: GradientCompression, folder: Path) -> None:
    """Write this rank's file into a folder, and on rank 0 the metadata."""
    compression.resolve_deferred()
    tensors = {
        f"{index}.{key}": tensor.detach().cpu().clone()
        for index, reducer in enumerate(compression.reducers)
        for key, tensor in reducer.tensors().items()
    }
    write_atomically(folder / _file_name(compression.comm.rank), lambda path: save_file(tensors, path))
    if compression.comm.rank == 0:
        text = json.dumps(_metadata(compression), indent=1)
        write_atomically(folder / METADATA, lambda path: path.write_text(text))


def load(compression: GradientCompression, folder: Path, *, resplit: bool = False) -> None:
    """Resume from a folder that `save` or `write` wrote; `resplit` allows another world size."""
    per_rank: list[list[dict[str, Tensor]]] = []
    metadata: dict[str, Any] = {}

    def read() -> None:
        metadata.update(_read_metadata(folder))
        _require_same_run(compression, metadata, folder, resplit)
        same = not _world_size_changed(metadata, compression)
        ranks = [compression.comm.rank] if same else range(metadata["world_size"])
        per_rank.extend(_read_tensors(folder / _file_name(rank), compression) for rank in ranks)

    run_on_all_ranks(compression.comm, read, f"another rank could not resume from {folder}.")
    for index, reducer in enumerate(compression.reducers):
        parts = [tensors[index] for tensors in per_rank]
        changed = _world_size_changed(metadata, compression)
        reducer.restore(_redistribute(parts, reducer) if changed else parts[0])


class CompressionState:
    """Compressed gradients as a `Stateful` of torch.distributed.checkpoint."""

    def __init__(self, compression: GradientCompression) -> None:
        if isinstance(compression.compressor, Auto | PowerSGD):
            raise ConfigError(
                f"the state of {compression.compressor.name} changes its shape, which torch.distributed.checkpoint "
                "cannot load; use save and load of smelt.train.gradients.checkpoint."
            )
        self._compression = compression
        self._prefix = f"worker-{compression.comm.rank}"

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of this rank."""
        self._compression.resolve_deferred()
        state = {f"{self._prefix}.{_IDENTITY}": self._identity()}
        for index, reducer in enumerate(self._compression.reducers):
            tensors = {**reducer.tensors(), "counts": self._padded_counts(reducer.counts)}
            for key, tensor in tensors.items():
                state[f"{self._prefix}.{index}.{key}"] = tensor.detach().reshape(tensor.shape or 1).clone()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Resume from the state of a checkpoint."""
        identity = state[f"{self._prefix}.{_IDENTITY}"].cpu()
        if not any(torch.equal(identity, accepted) for accepted in (self._identity(), self._old_identity())):
            raise ConfigError(
                "the checkpoint was written with another compressor, other settings or another world size; resume "
                "with the same, or leave its gradients out."
            )
        for index, reducer in enumerate(self._compression.reducers):
            own = reducer.tensors()
            tensors = {key: state[f"{self._prefix}.{index}.{key}"] for key in own}
            counts = tensors.pop("counts")
            tensors = {key: tensor.reshape(own[key].shape) for key, tensor in tensors.items()}
            reducer.restore({**tensors, "counts": counts[counts != _NO_COUNT]})

    def _padded_counts(self, counts: list[int]) -> Tensor:
        """[world_size] int64"""
        size = self._compression.reducers[0].comm.world_size
        return torch.tensor([*counts, *[_NO_COUNT] * size][:size])

    def _identity(self) -> Tensor:
        """[32] uint8: equal for runs that may resume from each other."""
        return self._hash(compression_identity(self._compression))

    def _old_identity(self) -> Tensor:
        """The same as version 0.1 wrote it."""
        identity = compression_identity(self._compression)
        settings = identity["settings"]
        old_values = {new: old for old, new in OLD_ERROR_FEEDBACK.items()}
        settings["error_feedback"] = old_values[settings["error_feedback"]]
        return self._hash(
            {
                "compressor": _old_names(type(self._compression.compressor), identity["compressor"]),
                "settings": _old_names(CompressionSettings, settings),
                "vectors": identity["buckets"],
            }
        )

    def _hash(self, identity: dict[str, Any]) -> Tensor:
        sizes = [self._compression.comm.world_size, self._compression.shards]
        text = json.dumps([sizes, identity], sort_keys=True)
        return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def compression_identity(compression: GradientCompression) -> dict[str, Any]:
    """Return what must be the same for a run to resume."""
    compressor = compression.compressor
    return {
        "compressor": {"name": compressor.name, **asdict(compressor)},
        "settings": asdict(compression.settings),
        "buckets": [[[part.name, list(part.shape)] for part in layout.slices] for layout in compression.layouts],
    }


def _metadata(compression: GradientCompression) -> dict[str, Any]:
    sizes = {"world_size": compression.comm.world_size, "shards": compression.shards}
    return {"format": _FORMAT, **sizes, "steps": compression.num_steps, **compression_identity(compression)}


def _require_same_run(compression: GradientCompression, metadata: dict[str, Any], folder: Path, resplit: bool) -> None:
    sizes = (metadata.get(key) for key in ("world_size", "shards"))
    if metadata.get("format") != _FORMAT or not all(isinstance(size, int) for size in sizes):
        raise DataError(f"{folder / METADATA} is not a state of compressed gradients that this version can read.")
    own = json.loads(json.dumps(compression_identity(compression)))
    for key, subject in (("buckets", "model"), ("compressor", "compressor"), ("settings", "settings")):
        if metadata.get(key) != own[key]:
            raise ConfigError(
                f"{folder} was written with another {subject}; resume with the same, or start without it."
            )
    if _world_size_changed(metadata, compression) and (compression.shards > 1 or metadata["shards"] > 1):
        raise ConfigError(
            f"{folder} was written by {metadata['world_size']} ranks that hold shards of the model; start as many "
            "again."
        )
    if _world_size_changed(metadata, compression) and not resplit:
        raise ConfigError(
            f"{folder} was written by {metadata['world_size']} ranks and there are {compression.comm.world_size}; "
            "start as many, or pass resplit=True to redistribute the residuals."
        )


def _world_size_changed(metadata: dict[str, Any], compression: GradientCompression) -> bool:
    return bool(metadata["world_size"] != compression.comm.world_size)


def _read_metadata(folder: Path) -> dict[str, Any]:
    try:
        metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / METADATA} cannot be read ({error}); pass a folder that a run has saved.") from error
    if not isinstance(metadata, dict):
        return {}
    return _upgrade_metadata(metadata) if metadata.get("format") == 1 else metadata


def _upgrade_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Convert the metadata of format 1, which version 0.1 wrote."""
    compressor, settings = dict(metadata.get("compressor", {})), dict(metadata.get("settings", {}))
    classes: dict[str, type[Compressor]] = {**COMPRESSORS, Dense.name: Dense}
    cls = classes.get(compressor.get("name", ""))
    if cls is not None:
        compressor = _current_names(cls, compressor)
    settings = _current_names(CompressionSettings, settings)
    old = settings.get("error_feedback")
    settings["error_feedback"] = OLD_ERROR_FEEDBACK.get(old, old) if isinstance(old, str) else old
    return {
        "format": _FORMAT,
        "world_size": metadata.get("workers"),
        "shards": metadata.get("shards"),
        "compressor": compressor,
        "settings": settings,
        "buckets": metadata.get("vectors"),
    }


def _current_names(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    renamed = renamed_keys(cls)
    return {renamed.get(key, key): value for key, value in values.items()}


def _old_names(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    renamed = {new: old for old, new in renamed_keys(cls).items()}
    return {renamed.get(key, key): value for key, value in values.items()}


def _read_tensors(path: Path, compression: GradientCompression) -> list[dict[str, Tensor]]:
    """Return the tensors of each bucket, after checking that all are present with the right shape."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read ({error}); pass a folder that a run has saved.") from error
    per_bucket = []
    for index, reducer in enumerate(compression.reducers):
        prefix = f"{index}."
        own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        for key, value in reducer.tensors().items():
            if key not in own or (own[key].shape != value.shape and key not in _VARIABLE_SHAPE):
                raise DataError(
                    f"{path} lacks {prefix}{key} in the shape of this model; pass a folder of the same run."
                )
        per_bucket.append(own)
    return per_bucket


def _redistribute(parts: list[dict[str, Tensor]], reducer: Reducer) -> dict[str, Tensor]:
    """Return what a rank starts with after the states of `len(parts)` ranks."""
    initial = {
        f"state.{key}": value
        for key, value in reducer.compressor.init_state(reducer.layout, reducer.comm.world_size).items()
    }
    kept = {f"state.{key}" for key in reducer.compressor.portable_state}
    tensors = {key: value for key, value in parts[0].items() if not key.startswith(("state.", "check."))}
    for key, value in initial.items():
        elementwise = value.shape == reducer.residual.shape
        tensors[key] = _mean([part[key] for part in parts]) if elementwise or key in kept else value
    tensors["residual"] = _mean([part["residual"] for part in parts])
    tensors["counts"] = torch.empty(0, dtype=torch.int64)
    pending = tensors["residual"].double() / reducer.settings.residual_momentum
    return {**tensors, "check.given": pending, "check.applied": torch.zeros_like(pending)}


def _mean(tensors: list[Tensor]) -> Tensor:
    """Average over ranks; integers are those of the first rank."""
    if not tensors[0].is_floating_point():
        return tensors[0]
    return torch.stack(tensors).double().mean(dim=0).to(tensors[0].dtype)


def _require_new(folder: Path) -> None:
    check_writable(folder)
    if folder.exists():
        raise ConfigError(f"{folder} exists already; give every checkpoint its own name, such as step-1000.")


def _file_name(rank: int) -> str:
    return f"gradients-{rank:05d}.safetensors"
