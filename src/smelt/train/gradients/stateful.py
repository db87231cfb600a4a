"""What the workers have not sent yet, in a checkpoint of torch.distributed.checkpoint, beside the model.

    state = {"model": model.state_dict(), "gradients": GradientState(compression)}
    checkpoint.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    checkpoint.load(state, storage_reader=HuggingFaceStorageReader(folder))

These two keep safetensors; what PyTorch takes by itself writes a pickle. A run goes on exactly with as many workers as
it had; `smelt.train.gradients.state` has the way to another number. A tensor is named after its worker, as no two hold
the same, and has one shape from the first step on, since PyTorch reads into tensors that are there already.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from smelt.errors import ConfigError
from smelt.train.gradients.autotune.auto import Auto
from smelt.train.gradients.compression import Compressed
from smelt.train.gradients.compressors import PowerSGD
from smelt.train.gradients.state import identity_of

_IDENTITY = "identity"
_NONE = -1  # in place of a count, before the first step


class GradientState:
    """A part of such a checkpoint (PyTorch calls it stateful)."""

    def __init__(self, compression: Compressed) -> None:
        if isinstance(compression.compressor, Auto | PowerSGD):
            raise ConfigError(
                f"what {compression.compressor.name} keeps changes its shape, and torch.distributed.checkpoint cannot "
                "read that; use save and load of smelt.train.gradients.state."
            )
        self._compression = compression
        self._prefix = f"worker-{compression.workers.rank}"

    def state_dict(self) -> dict[str, Tensor]:
        """Of this worker."""
        self._compression.settle()
        found = {f"{self._prefix}.{_IDENTITY}": self._identity()}
        for position, reducer in enumerate(self._compression.reducers):
            tensors = {**reducer.tensors(), "counts": self._counts(reducer.counts)}
            for key, tensor in tensors.items():
                found[f"{self._prefix}.{position}.{key}"] = tensor.detach().reshape(tensor.shape or 1).clone()
        return found

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what a checkpoint holds."""
        if not torch.equal(state[f"{self._prefix}.{_IDENTITY}"].cpu(), self._identity()):
            raise ConfigError(
                "the checkpoint was written with another compressor, other settings or another number of workers; go "
                "on with the same, or leave its gradients out."
            )
        for position, reducer in enumerate(self._compression.reducers):
            own = reducer.tensors()
            found = {key: state[f"{self._prefix}.{position}.{key}"] for key in own}
            counts = found.pop("counts")
            tensors = {key: tensor.reshape(own[key].shape) for key, tensor in found.items()}
            reducer.restore({**tensors, "counts": counts[counts != _NONE]})

    def _counts(self, counts: list[int]) -> Tensor:
        """[workers] int64"""
        size = self._compression.reducers[0].workers.size
        return torch.tensor([*counts, *[_NONE] * size][:size])

    def _identity(self) -> Tensor:
        """[32] uint8: the same for runs that may go on from each other."""
        workers = [self._compression.workers.size, self._compression.shards]
        text = json.dumps([workers, identity_of(self._compression)], sort_keys=True)
        return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
