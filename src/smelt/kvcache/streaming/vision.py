"""How a vision-language model sees frames: the common ways in which the networks of transformers make tokens of them.

There are three. Some networks take a video as a row of patches with a grid (Qwen2-VL and its kin, which join frames in
pairs), some take it as frames (LLaVA-OneVision), and the others take images, so that each frame is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smelt.errors import DataError, ModelError

Prepare = Callable[[Tensor], Mapping[str, Tensor]]  # frames [frames, channels, height, width]: what the network takes


@dataclass(frozen=True)
class FrameLayout:
    """Of the tokens of one frame."""

    patches: int
    grid: tuple[int, int] | None  # rows and columns, where they are known
    after: Tensor  # [tokens, width]: what the network sets behind a video, whatever it shows; often nothing


class FrameEncoder:
    """Frames in, tokens out. `prepare` is what brings frames into the form that the network's own call for features
    takes, such as a processor's; without it they must be sized and normalised already."""

    def __init__(self, network: PreTrainedModel, prepare: Prepare | None = None) -> None:
        base: Any = network.base_model
        self.network, self._given = network, prepare
        self._vision: Any = getattr(base.config, "vision_config", None)
        self._video = hasattr(base, "get_video_features")
        self._look: Any = getattr(base, "get_video_features" if self._video else "get_image_features", None)
        if self._look is None or self._vision is None:
            raise ModelError("this network has no eyes: a stream of frames needs a vision-language model.")
        if getattr(self._vision, "deepstack_visual_indexes", None):
            raise ModelError("this network adds what it sees to its inner layers too, which a stream cannot feed yet.")
        names = inspect.signature(self._look).parameters
        self._pixels, *others = names
        self.gridded = "video_grid_thw" in names
        self._rows_of_images = self._video or "pixel_attention_mask" in names  # they come as [batch, images, ...]
        self.joined = int(getattr(self._vision, "temporal_patch_size", 1)) if self.gridded else 1  # frames that are one
        wanted = [name for name in others if names[name].default is names[name].empty and not _rest(names[name])]
        if wanted and prepare is None:
            raise ModelError(f"this network wants {' and '.join(wanted)} beside pixels; give `prepare` to add them.")

    def __call__(self, frames: Tensor, shape: FrameLayout) -> Tensor:
        """Tokens [frames / joined, patches, width] of frames [frames, channels, height, width]."""
        found = self._tokens(self._prepared(frames))
        seen = len(frames) // self.joined
        if len(found) != seen * shape.patches + len(shape.after):
            raise DataError(f"the network did not see {seen} frames in {len(frames)}; {_EMPTY}.")
        return found[: seen * shape.patches].unflatten(0, (seen, shape.patches))

    def shape(self, frames: Tensor) -> FrameLayout:
        """What becomes of frames of this size, found by looking at the first of them, and at it twice."""
        frame = frames[:1].repeat_interleave(self.joined, dim=0)
        once, inputs = self._tokens(self._prepared(frame)), self._prepared(torch.cat((frame, frame)))
        patches = len(self._tokens(inputs)) - len(once)
        if patches < 1:
            raise DataError(f"the network sees no more in two frames than in one; {_EMPTY}.")
        after = once[patches:].clone()
        if self.gridded:
            rows, columns = (int(side) // self._vision.spatial_merge_size for side in inputs["video_grid_thw"][0, 1:])
            return FrameLayout(patches, (rows, columns), after)
        side = round(patches**0.5)
        return FrameLayout(patches, (side, side) if side * side == patches else None, after)

    def _tokens(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """All that the network makes of them: [tokens, width]."""
        found: Any = self._look(**inputs, return_dict=True)
        found = getattr(found, "pooler_output", found)
        found = found if isinstance(found, list | tuple) else [found]
        tokens = torch.cat([each.flatten(0, -2) for each in found])
        return tokens.to(self.network.get_input_embeddings().weight)

    def _prepared(self, frames: Tensor) -> Mapping[str, Tensor]:
        if self._given is not None:
            return self._given(frames)
        frames = frames.to(self.network.device, self.network.dtype)
        if self.gridded:
            patches, grid = self._patches(frames)
            return {self._pixels: patches, "video_grid_thw": grid}
        return {self._pixels: frames[None] if self._rows_of_images else frames}

    def _patches(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Patches [times * rows * columns, channels * joined * side * side], those that are merged beside each other,
        and the grid [1, 3]."""
        side, merge = self._vision.patch_size, self._vision.spatial_merge_size
        height, width = frames.shape[2:]
        if height % (side * merge) or width % (side * merge):
            raise DataError(
                f"frames of {height} x {width} pixels cannot be cut into patches of {side * merge}; resize them first."
            )
        times, rows, columns = len(frames) // self.joined, height // side, width // side
        cut = frames.reshape(times, self.joined, -1, rows // merge, merge, side, columns // merge, merge, side)
        cut = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # times, rows, columns, within a merge, channels, joined, pixels
        grid = torch.tensor([[times, rows, columns]], device=frames.device)
        return cut.reshape(times * rows * columns, -1), grid


def _rest(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


_EMPTY = "some networks take frames for padding that are zero everywhere, so normalise frames first"
