"""Mask rearrangement lowers the block-diagonal objective and matches the paper's greedy algorithm."""

from __future__ import annotations

import numpy as np
import pytest

from smelt.compression.pruning.fisher import rearrange


def objective(gradients: np.ndarray, kept: np.ndarray) -> float:
    pruned = np.setdiff1d(np.arange(gradients.shape[1]), kept)
    return float((gradients[:, pruned].sum(1) ** 2).sum())


def plain_greedy(gradients: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The paper's loop, written out with explicit sums."""
    order = np.argsort((gradients**2).sum(0), kind="stable").tolist()
    count = gradients.shape[1] - len(kept)
    pruned = order[:count]
    for joining in order[count:]:
        pruned = [*pruned, joining]
        lengths = [pruning_objective(gradients, [p for p in pruned if p != leaving]) for leaving in pruned]
        pruned.pop(int(np.argmin(lengths)))
    return np.setdiff1d(np.arange(gradients.shape[1]), pruned)


def pruning_objective(gradients: np.ndarray, pruned: list[int]) -> float:
    return float((gradients[:, pruned].sum(1) ** 2).sum())


def correlated(seed: int, units: int = 40, batches: int = 64) -> np.ndarray:
    generator = np.random.default_rng(seed)
    common = generator.normal(size=(batches, 3)) @ generator.normal(size=(3, units))
    return common + 0.3 * generator.normal(size=(batches, units))


@pytest.mark.parametrize("seed", range(5))
def test_matches_the_plain_greedy_algorithm(seed: int) -> None:
    gradients = correlated(seed, units=15)
    kept = np.sort(np.argsort(-(gradients**2).sum(0))[:9])
    assert np.array_equal(rearrange(gradients, kept), plain_greedy(gradients, kept))


def test_correlated_gradients_gain_most_of_the_objective() -> None:
    ratios = []
    for seed in range(10):
        gradients = correlated(seed)
        kept = np.sort(np.argsort(-(gradients**2).sum(0))[:20])
        better = rearrange(gradients, kept)
        assert len(better) == len(kept)
        ratios.append(objective(gradients, better) / objective(gradients, kept))
    assert np.mean(ratios) < 0.3 and max(ratios) < 1


def test_nothing_to_rearrange() -> None:
    gradients = correlated(0, units=5)
    assert np.array_equal(rearrange(gradients, np.arange(5)), np.arange(5))
    assert len(rearrange(gradients, np.arange(0))) == 0
