"""Tokens of a step grouped by LoRA adapter, for grouped kernels, and the plain reference of those kernels.

A tile is up to `block_m` tokens of one adapter. The number of tiles depends on the number of tokens alone, so a CUDA
graph can read them: tiles that a step does not need are empty.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

MANY_TOKENS = 256  # a step with more takes large tiles, which read the factors less often


def block_m(tokens: int) -> int:
    """Return the tokens of a tile, for steps with `tokens` tokens."""
    return 16 if tokens <= MANY_TOKENS else 64


@dataclass(frozen=True)
class LoraTiles:
    """Tokens with an adapter, in tiles of one adapter each; int64."""

    adapters: Tensor  # [tiles], counted from 1; 0: an empty tile
    rows: Tensor  # [tiles, block_m]: the tokens of a tile; -1: none

    @classmethod
    def pack(cls, indices: np.ndarray[Any, Any], tokens: int, max_loras: int) -> np.ndarray[Any, Any]:
        """Return the tiles as one int64 array, for a step padded to `tokens` tokens; `indices` are the adapters of its
        first tokens, 1 to `max_loras`, 0: none."""
        tiles, width = _max_tiles(tokens, max_loras), block_m(tokens)
        values = np.zeros(tiles * (1 + width), dtype=np.int64)
        adapters, rows = values[:tiles], values[tiles:]
        rows[:] = -1
        order = np.argsort(indices, kind="stable")
        order = order[np.count_nonzero(indices == 0) :]
        names, starts, counts = np.unique(indices[order], return_index=True, return_counts=True)
        tile_counts = -(-counts // width)
        used = int(tile_counts.sum())
        adapters[:used] = np.repeat(names, tile_counts)
        first_rows = (np.cumsum(tile_counts) - tile_counts) * width  # of each adapter
        rows[np.arange(len(order)) + np.repeat(first_rows - starts, counts)] = order
        return values

    @classmethod
    def split(cls, values: Tensor, tokens: int) -> LoraTiles:
        """View what `pack` returns as tiles."""
        tiles = len(values) // (1 + block_m(tokens))
        return cls(values[:tiles], values[tiles:].view(tiles, -1))


def _max_tiles(tokens: int, max_loras: int) -> int:
    """Return the most tiles that `tokens` tokens can need: the last tile of each adapter may be nearly empty."""
    return tokens // block_m(tokens) + min(tokens, max_loras)


def lora_add_reference(y: Tensor, x: Tensor, down: Tensor, up: Tensor, offsets: Tensor, indices: Tensor) -> None:
    """Add the LoRA deltas of layers with the same input to their outputs in place, token by token.

    y [tokens, out], x [tokens, in], down [adapters, layers * rank, in], up [adapters, out, rank], offsets [layers + 1]:
    the columns of y at which each layer starts, and the end; indices [tokens]: adapters counted from 1, 0: none.
    """
    bounds, rank = offsets.tolist(), up.shape[-1]
    for token, index in enumerate(indices.tolist()):
        if index:
            shrunk = down[index - 1].float() @ x[token].float()
            for layer, (start, stop) in enumerate(itertools.pairwise(bounds)):
                delta = up[index - 1, start:stop].float() @ shrunk[layer * rank : (layer + 1) * rank]
                y[token, start:stop] = (y[token, start:stop].float() + delta).to(y.dtype)
