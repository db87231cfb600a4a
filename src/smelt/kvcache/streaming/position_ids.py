"""At which positions the frames of a stream stand, and the words after them. They grow as long as the stream runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ModelError
from smelt.kvcache.streaming.vision import FrameLayout


class FramePositions:
    """Positions [axes, tokens] after a prefix of words. Most networks count tokens, on one axis. Those that know time,
    rows and columns have three and a rule of their own for them (`get_rope_index`): it is asked about one and two
    frames, and what it does with more of them follows, since from a frame to the next only the time moves on."""

    def __init__(self, network: PreTrainedModel, prefix: int, shape: FrameLayout) -> None:
        self.prefix, self.patches, self.device = prefix, shape.patches, network.device
        self._base: Any = network.base_model
        self._grid = shape.grid
        self.axes = 3 if hasattr(self._base, "get_rope_index") else 1
        self._asked = cache(self._ask)

    def frames(self, first: int, count: int) -> Tensor:
        """Of frames that come one after the other, from this one on: [axes, count * patches]"""
        begin, step = self._frame(0), self._frame(1) - self._frame(0)  # [axes, patches]
        numbers = torch.arange(first, first + count, device=self.device)
        return (begin[:, None] + numbers[:, None] * step[:, None]).flatten(1)

    def words(self, after: int, count: int) -> Tensor:
        """Of words that follow so many frames: [axes, count]"""
        return self._first_word(after)[:, None] + torch.arange(count, device=self.device)

    def _frame(self, at: int) -> Tensor:
        begin = self.prefix + at * self.patches
        return self._asked(2)[:, begin : begin + self.patches]

    def _first_word(self, after: int) -> Tensor:  # [axes]
        """Where words go on may depend on whether a video is longer than wide; once it is, only its length counts."""
        far = 2 + max(self._grid or (0, 0))
        if after <= far:
            return self._asked(after)[:, -1]
        step = self._asked(far)[:, -1] - self._asked(far - 1)[:, -1]
        return self._asked(far)[:, -1] + (after - far) * step

    def _ask(self, frames: int) -> Tensor:
        """Of the prefix, so many frames, and one word: [axes, tokens]"""
        tokens = frames * self.patches
        if self.axes == 1:
            return torch.arange(self.prefix + tokens + 1, device=self.device)[None]
        assert self._grid is not None
        config = self._base.config
        ids = torch.zeros(1, self.prefix + tokens + 1, dtype=torch.int64, device=self.device)
        ids[:, self.prefix : self.prefix + tokens] = config.video_token_id
        kinds = torch.zeros_like(ids, dtype=torch.int32)
        kinds[:, self.prefix : self.prefix + tokens] = 2  # a video
        merge = config.vision_config.spatial_merge_size
        grid = torch.tensor([[frames, *(side * merge for side in self._grid)]], device=self.device)
        try:
            found, _ = self._base.get_rope_index(ids, mm_token_type_ids=kinds, video_grid_thw=grid if frames else None)
        except (RuntimeError, StopIteration, TypeError) as error:
            raise ModelError("this network does not number a video as one block of frames.") from error
        positions: Tensor = found[:, 0]
        return positions
