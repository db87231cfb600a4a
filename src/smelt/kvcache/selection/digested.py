"""The digests of all pages of a cache, block by block: a page is digested once, when its last token is written.

They belong to blocks, not to requests, so that requests that share pages share digests, and nothing is to be freed when
a request ends. The digest of a block that is being filled again is of its last content; only full pages are judged.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from smelt.kvcache.selection.page_summary import Digest, page_scores

Heads = Mapping[int, tuple[int, int]]  # layer -> heads of keys, and their width


class Digested:
    """High and low corners of each layer's pages, [blocks, kv_heads, width], on the device that judges them."""

    def __init__(self, digest: Digest, heads: Heads, blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.digest = digest
        self._high, self._low = (
            {layer: torch.zeros(blocks, *shape, dtype=dtype, device=device) for layer, shape in heads.items()}
            for _ in range(2)
        )

    @property
    def nbytes(self) -> int:
        return sum(corner.nbytes for corners in (self._high, self._low) for corner in corners.values())

    def update(self, layer: int, blocks: Tensor, keys: Tensor) -> None:
        """These blocks [n] are full now; their keys are [n, kv_heads, tokens, width]."""
        high, low = self.digest.box(keys)
        blocks = blocks.to(high.device)
        self._high[layer].index_copy_(0, blocks, high)
        self._low[layer].index_copy_(0, blocks, low)

    def scores(self, layer: int, queries: Tensor, tables: Tensor) -> Tensor:
        """Of queries [requests, kv_heads, group, width] for their pages [requests, pages]: [requests, kv_heads,
        pages]. What it says about a page that is not full means nothing."""
        return page_scores(queries, self._high[layer][tables], self._low[layer][tables])
