"""What the workers have not sent yet, in a checkpoint: a safetensors file for each of them and one of plain facts.

With the same number of workers a run goes on exactly. With another number what is pending is shared out: the optimiser
is given means, so what all workers still owe it is the mean of their residuals, and every new worker starts with that
mean. Thresholds are kept; partitions and counts, which belong to a number of workers, start anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from smelt.errors import ConfigError, DataError, ResourceError, SmeltError
from smelt.files import check_writable, write_atomically
from smelt.train.gradients.comm import Workers
from smelt.train.gradients.compression import Compressed
from smelt.train.gradients.reducer import Reducer

FACTS = "gradients.json"
_FORMAT = 1


def save(compression: Compressed, folder: Path) -> None:
    """Write a new folder, which all workers see; it is there as a whole or not at all."""
    workers = compression.workers
    together(workers, lambda: _refuse_existing(folder), f"{folder} could not be made on another worker.")
    partial = folder.with_name(f".{folder.name}.partial")
    together(workers, lambda: write(compression, partial), f"another worker could not write its part of {folder}.")
    if workers.rank == 0:
        partial.rename(folder)
    workers.gather(torch.zeros(1), "agreement")  # nobody goes on before the folder has its name


def write(compression: Compressed, folder: Path) -> None:
    """Write this worker's file into a folder, and on the first worker the facts."""
    compression.settle()
    tensors = {
        f"{position}.{key}": tensor.detach().cpu().clone()
        for position, reducer in enumerate(compression.reducers)
        for key, tensor in reducer.tensors().items()
    }
    write_atomically(folder / _file(compression.workers.rank), lambda path: save_file(tensors, path))
    if compression.workers.rank == 0:
        text = json.dumps(_facts(compression), indent=1)
        write_atomically(folder / FACTS, lambda path: path.write_text(text))


def load(compression: Compressed, folder: Path, *, resplit: bool = False) -> None:
    """Go on from a folder that `save` or `write` filled; `resplit` allows another number of workers."""
    found: list[list[dict[str, Tensor]]] = []
    facts: dict[str, Any] = {}

    def read() -> None:
        facts.update(_read_facts(folder))
        _check_same(compression, facts, folder, resplit)
        same = facts["workers"] == compression.workers.size
        ranks = [compression.workers.rank] if same else range(facts["workers"])
        found.extend(_read_tensors(folder / _file(rank), compression) for rank in ranks)

    together(compression.workers, read, f"another worker could not go on from {folder}.")
    for position, reducer in enumerate(compression.reducers):
        parts = [worker[position] for worker in found]
        reducer.restore(parts[0] if len(parts) == 1 and not _changed(facts, compression) else _shared(parts, reducer))


def _shared(parts: list[dict[str, Tensor]], reducer: Reducer) -> dict[str, Tensor]:
    """What a worker starts with when there were `len(parts)` workers before."""
    fresh = {
        f"state.{key}": value for key, value in reducer.compressor.start(reducer.layout, reducer.workers.size).items()
    }
    kept = {f"state.{key}" for key in reducer.compressor.carried}
    tensors = {key: value for key, value in parts[0].items() if not key.startswith(("state.", "check."))}
    for key, value in fresh.items():
        elementwise = value.shape == reducer.residual.shape
        tensors[key] = _mean([part[key] for part in parts]) if elementwise or key in kept else value
    tensors["residual"] = _mean([part["residual"] for part in parts])
    tensors["counts"] = torch.empty(0, dtype=torch.int64)
    pending = tensors["residual"].double() / reducer.settings.beta
    return {**tensors, "check.given": pending, "check.applied": torch.zeros_like(pending)}


def _mean(tensors: list[Tensor]) -> Tensor:
    """Of whole numbers those of the first worker."""
    if not tensors[0].is_floating_point():
        return tensors[0]
    return torch.stack(tensors).double().mean(dim=0).to(tensors[0].dtype)


def _facts(compression: Compressed) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "workers": compression.workers.size,
        "shards": compression.shards,
        "steps": compression.steps,
        **identity_of(compression),
    }


def identity_of(compression: Compressed) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    return {
        "compressor": {"name": compression.compressor.name, **asdict(compression.compressor)},
        "settings": asdict(compression.settings),
        "vectors": [[[piece.name, list(piece.shape)] for piece in layout.pieces] for layout in compression.layouts],
    }


def _check_same(compression: Compressed, facts: dict[str, Any], folder: Path, resplit: bool) -> None:
    numbers = (facts.get(key) for key in ("workers", "shards"))
    if facts.get("format") != _FORMAT or not all(isinstance(number, int) for number in numbers):
        raise DataError(f"{folder / FACTS} is no state of compressed gradients that this version can read.")
    own = json.loads(json.dumps(identity_of(compression)))
    for key, what in (("vectors", "model"), ("compressor", "compressor"), ("settings", "settings")):
        if facts.get(key) != own[key]:
            raise ConfigError(f"{folder} was written with another {what}; go on with the same, or start without it.")
    if _changed(facts, compression) and (compression.shards > 1 or facts["shards"] > 1):
        raise ConfigError(
            f"{folder} was written by {facts['workers']} workers that hold parts of the model; start as many again."
        )
    if _changed(facts, compression) and not resplit:
        raise ConfigError(
            f"{folder} was written by {facts['workers']} workers and there are {compression.workers.size}; start as "
            "many, or give resplit=True to share out what they had not sent."
        )


def _changed(facts: dict[str, Any], compression: Compressed) -> bool:
    return bool(facts["workers"] != compression.workers.size)


def _read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / FACTS} cannot be read ({error}); give a folder that a run has saved.") from error
    return facts if isinstance(facts, dict) else {}


def _read_tensors(path: Path, compression: Compressed) -> list[dict[str, Tensor]]:
    """Of each vector; every tensor that the run needs is there and has its shape."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read ({error}); give a folder that a run has saved.") from error
    found = []
    for position, reducer in enumerate(compression.reducers):
        prefix = f"{position}."
        part = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        for key, value in reducer.tensors().items():
            fits = key in part and (part[key].shape == value.shape or key in ("counts", "state.partition"))
            if not fits:
                raise DataError(
                    f"{path} lacks {prefix}{key} in the shape of this model; give a folder of the same run."
                )
        found.append(part)
    return found


def _refuse_existing(folder: Path) -> None:
    check_writable(folder)
    if folder.exists():
        raise ConfigError(f"{folder} is there already; give every checkpoint a name of its own, such as step-1000.")


def together(workers: Workers, work: Any, sentence: str) -> None:
    """Do something on every worker; if it fails on one, all end with a sentence."""
    failure: SmeltError | None = None
    try:
        work()
    except SmeltError as error:
        failure = error
    failed = workers.gather(torch.tensor([failure is not None]), "agreement").any()
    if failure is not None:
        raise failure
    if failed:
        raise ResourceError(sentence)


def _file(rank: int) -> str:
    return f"gradients-{rank:05d}.safetensors"
