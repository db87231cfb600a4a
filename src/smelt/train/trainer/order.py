"""Which samples a worker sees when: an endless shuffled stream, of which every worker takes its turn.

A sample's place depends on the seed and its number in the stream only. So the number of samples that were seen is all
that a checkpoint needs, and another number of workers goes on where the last one stopped.
"""

from __future__ import annotations

import numpy as np


class ShuffledSampler:
    """The stream: one permutation of all samples after the other."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._epoch, self._shuffled = -1, np.empty(0, dtype=np.int64)

    def places(self, start: int, count: int) -> np.ndarray:
        """Which samples have the numbers from `start` on: [count] int64"""
        return np.array([self._place(number) for number in range(start, start + count)], dtype=np.int64)

    def _place(self, number: int) -> int:
        epoch, place = divmod(number, self._samples)
        if epoch != self._epoch:
            self._shuffled = np.random.Generator(np.random.PCG64([self._seed, epoch])).permutation(self._samples)
            self._epoch = epoch
        return int(self._shuffled[place])


def batch_start(seen: int, part: int, batch: int, workers: int, rank: int) -> int:
    """The number of the first sample of a worker's batch in a pass, when `seen` were seen before the step."""
    return seen + (part * workers + rank) * batch
