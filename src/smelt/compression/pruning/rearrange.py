"""Rearrangement: which units of one layer go, given how many, by the block-diagonal Fisher (Kwon et al., 2022).

Minimises || sum of the pruned units' gradients ||^2 over mini-batches, greedily: every kept unit in turn joins the
pruned set, and the member whose return leaves the shortest sum comes back.
"""

from __future__ import annotations

import numpy as np


def rearrange(gradients: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The positions to keep, as many as before. gradients: [mini-batches, units]."""
    units = gradients.shape[1]
    pruned_count = units - len(kept)
    if pruned_count == 0 or not len(kept):
        return kept
    gram = gradients.T.astype(np.float64) @ gradients.astype(np.float64)  # [units, units]
    length = np.diag(gram).copy()
    order = np.argsort(length, kind="stable")
    pruned = np.zeros(units, dtype=bool)
    pruned[order[:pruned_count]] = True
    # sums[i] = <gradient of i, sum over the pruned set>; leaving unit i out changes the squared length by this:
    sums = gram[:, pruned].sum(1)
    for joining in order[pruned_count:]:
        pruned[joining] = True
        sums += gram[:, joining]
        change = np.where(pruned, length - 2 * sums, np.inf)
        leaving = int(change.argmin())
        pruned[leaving] = False
        sums -= gram[:, leaving]
    return np.flatnonzero(~pruned)
