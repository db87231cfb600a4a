"""Demonstrations for policies: observations and the expert's actions, from a NumPy archive without pickles.

The archive holds `observations` [steps, features] and `actions`: [steps] whole numbers, or [steps, size] of continuous
actions, as in D4RL.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from smelt.data.batches import Batch, check_positive
from smelt.data.images import read_member
from smelt.data.limits import DecodedBytes, check_regular_file
from smelt.errors import DataError

_ARRAYS = ("observations", "actions")


@dataclass(frozen=True, eq=False)
class Demonstrations:
    """Steps of an expert in an environment."""

    name: str
    observations: np.ndarray  # [steps, features] float32
    actions: np.ndarray  # [steps] int64, or [steps, size] float32

    def __len__(self) -> int:
        return len(self.observations)

    @property
    def action_space(self) -> str:
        return "discrete" if self.actions.ndim == 1 else "continuous"

    def take(self, indices: Sequence[int] | np.ndarray) -> Demonstrations:
        """Return the steps at these indices, in this order."""
        index = np.asarray(indices, dtype=np.int64)
        return replace(self, observations=self.observations[index], actions=self.actions[index])


def has_demonstrations(path: Path) -> bool:
    """Return whether a NumPy archive holds demonstrations rather than images."""
    if not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return {f"{name}.npy" for name in _ARRAYS} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def load_demonstrations(path: Path) -> Demonstrations:
    """Load a NumPy archive and check its arrays."""
    check_regular_file(path)
    try:
        with zipfile.ZipFile(path) as archive:
            budget = DecodedBytes(path)
            observations, actions = (read_member(archive, name, budget) for name in _ARRAYS)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as demonstrations ({' '.join(str(error).split())[:200]}).") from error
    _check(path, observations, actions)
    discrete = np.issubdtype(actions.dtype, np.integer)
    return Demonstrations(
        str(path), observations.astype(np.float32), actions.astype("int64" if discrete else "float32")
    )


def demonstration_batches(data: Demonstrations, *, samples: int | None, batch_size: int, seed: int) -> list[Batch]:
    """Return batches of random steps, each at most once. `samples` None takes all of them, in order."""
    check_positive(samples=samples, batch_size=batch_size)
    if samples is not None:
        data = data.take(np.random.Generator(np.random.PCG64(seed)).permutation(len(data))[:samples])
    observations, actions = torch.from_numpy(data.observations), torch.from_numpy(data.actions)
    return [
        {"observations": states, "labels": labels}
        for states, labels in zip(observations.split(batch_size), actions.split(batch_size), strict=True)
    ]


def _check(path: Path, observations: np.ndarray, actions: np.ndarray) -> None:
    numbers = np.issubdtype(observations.dtype, np.number) and np.issubdtype(actions.dtype, np.number)
    if observations.ndim != 2 or not numbers or np.iscomplexobj(observations) or np.iscomplexobj(actions):
        raise DataError(
            f"{path} has observations {observations.dtype} {list(observations.shape)}: expected numbers "
            "[steps, features]."
        )
    expected = 1 if np.issubdtype(actions.dtype, np.integer) else 2
    if actions.ndim != expected or len(actions) != len(observations) or not len(actions):
        raise DataError(
            f"{path} has actions {actions.dtype} {list(actions.shape)} for {len(observations):,} observations: "
            "expected whole numbers [steps], or fractions [steps, size]."
        )
    if not np.isfinite(observations).all() or not np.isfinite(actions).all():
        raise DataError(f"{path} contains NaN or infinity: remove these steps.")
    if expected == 1 and actions.min() < 0:
        raise DataError(f"{path} has negative actions: discrete actions are numbered from 0.")
