"""Position ids of the frames of a stream and of the text after them. They grow as long as the stream runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import ModelError
from smelt.kvcache.streaming.vision import FrameLayout


class FramePositions:
    """Position ids [axes, tokens] after a text prefix. Most networks count tokens, on one axis. Those with time, rows
    and columns (M-RoPE) have three axes and their own rule (`get_rope_index`): it is called for one and two frames and
    extrapolated, since only the time advances from one frame to the next."""

    def __init__(self, network: PreTrainedModel, prefix: int, layout: FrameLayout) -> None:
        self.prefix, self.patches, self.device = prefix, layout.patches, network.device
        self._base: Any = network.base_model
        self._grid = layout.grid
        self.axes = 3 if hasattr(self._base, "get_rope_index") else 1
        self._cached_positions = cache(self._positions)

    def frames(self, first: int, count: int) -> Tensor:
        """Return the positions of consecutive frames from index `first` on: [axes, count * patches]."""
        begin, step = self._frame(0), self._frame(1) - self._frame(0)  # [axes, patches]
        indices = torch.arange(first, first + count, device=self.device)
        return (begin[:, None] + indices[:, None] * step[:, None]).flatten(1)

    def text(self, num_frames: int, count: int) -> Tensor:
        """Return the positions of text after `num_frames` frames: [axes, count]."""
        return self._first_text(num_frames)[:, None] + torch.arange(count, device=self.device)

    def _frame(self, at: int) -> Tensor:
        begin = self.prefix + at * self.patches
        return self._cached_positions(2)[:, begin : begin + self.patches]

    def _first_text(self, num_frames: int) -> Tensor:  # [axes]
        """Return the first text position; it may depend on whether a video is longer than wide, then on its length."""
        far = 2 + max(self._grid or (0, 0))
        if num_frames <= far:
            return self._cached_positions(num_frames)[:, -1]
        step = self._cached_positions(far)[:, -1] - self._cached_positions(far - 1)[:, -1]
        return self._cached_positions(far)[:, -1] + (num_frames - far) * step

    def _positions(self, frames: int) -> Tensor:
        """Return the positions of the prefix, `frames` frames and one text token: [axes, tokens]."""
        tokens = frames * self.patches
        if self.axes == 1:
            return torch.arange(self.prefix + tokens + 1, device=self.device)[None]
        assert self._grid is not None
        config = self._base.config
        ids = torch.zeros(1, self.prefix + tokens + 1, dtype=torch.int64, device=self.device)
        ids[:, self.prefix : self.prefix + tokens] = config.video_token_id
        token_types = torch.zeros_like(ids, dtype=torch.int32)
        token_types[:, self.prefix : self.prefix + tokens] = 2  # video
        merge = config.vision_config.spatial_merge_size
        grid = torch.tensor([[frames, *(side * merge for side in self._grid)]], device=self.device)
        try:
            indexed, _ = self._base.get_rope_index(
                ids, mm_token_type_ids=token_types, video_grid_thw=grid if frames else None
            )
        except (RuntimeError, StopIteration, TypeError) as error:
            raise ModelError("this network does not number a video as one block of frames.") from error
        positions: Tensor = indexed[:, 0]
        return positions
