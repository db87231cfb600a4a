"""Encode frames into tokens with the vision tower of a vision-language model, in the input layouts of transformers.

There are three: patches with a grid (Qwen2-VL and relatives, which merge frames in pairs), frames (LLaVA-OneVision),
and images, where each frame is one image.
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

PreprocessFn = Callable[[Tensor], Mapping[str, Tensor]]  # frames [frames, channels, height, width] -> model inputs


@dataclass(frozen=True)
class FrameLayout:
    """Layout of the tokens of one frame."""

    patches: int
    grid: tuple[int, int] | None  # rows and columns, where they are known
    trailing: Tensor  # [tokens, hidden]: constant tokens the network appends to a video; often none


class FrameEncoder:
    """Encode frames into tokens. `preprocess` converts frames into the inputs of the network's feature method, as a
    processor does; without it frames must be resized and normalized already."""

    def __init__(self, network: PreTrainedModel, preprocess: PreprocessFn | None = None) -> None:
        base: Any = network.base_model
        self.network, self._preprocess = network, preprocess
        self._vision: Any = getattr(base.config, "vision_config", None)
        self._video = hasattr(base, "get_video_features")
        self._get_features: Any = getattr(base, "get_video_features" if self._video else "get_image_features", None)
        if self._get_features is None or self._vision is None:
            raise ModelError("this network has no vision tower: a stream of frames needs a vision-language model.")
        if getattr(self._vision, "deepstack_visual_indexes", None):
            raise ModelError(
                "this network feeds visual features to inner layers (deepstack), which a stream does not support yet."
            )
        names = inspect.signature(self._get_features).parameters
        self._pixels, *others = names
        self.uses_grid = "video_grid_thw" in names
        self._batched_images = self._video or "pixel_attention_mask" in names  # [batch, images, ...]
        self.temporal_merge = int(getattr(self._vision, "temporal_patch_size", 1)) if self.uses_grid else 1
        required = [
            name for name in others if names[name].default is names[name].empty and not _is_variadic(names[name])
        ]
        if required and preprocess is None:
            raise ModelError(
                f"this network needs {' and '.join(required)} beside pixels; give `preprocess` to add them."
            )

    def __call__(self, frames: Tensor, layout: FrameLayout) -> Tensor:
        """Encode frames [frames, channels, height, width]: [frames / temporal_merge, patches, hidden]."""
        output = self._tokens(self._inputs(frames))
        count = len(frames) // self.temporal_merge
        if len(output) != count * layout.patches + len(layout.trailing):
            raise DataError(f"the network did not see {count} frames in {len(frames)}; {_ZERO_FRAMES}.")
        return output[: count * layout.patches].unflatten(0, (count, layout.patches))

    def layout(self, frames: Tensor) -> FrameLayout:
        """Measure the layout of frames of this size by encoding the first of them once and twice."""
        frame = frames[:1].repeat_interleave(self.temporal_merge, dim=0)
        once, inputs = self._tokens(self._inputs(frame)), self._inputs(torch.cat((frame, frame)))
        patches = len(self._tokens(inputs)) - len(once)
        if patches < 1:
            raise DataError(f"the network sees no more in two frames than in one; {_ZERO_FRAMES}.")
        trailing = once[patches:].clone()
        if self.uses_grid:
            rows, columns = (int(side) // self._vision.spatial_merge_size for side in inputs["video_grid_thw"][0, 1:])
            return FrameLayout(patches, (rows, columns), trailing)
        side = round(patches**0.5)
        return FrameLayout(patches, (side, side) if side * side == patches else None, trailing)

    def _tokens(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return all tokens of these inputs: [tokens, hidden]."""
        output: Any = self._get_features(**inputs, return_dict=True)
        output = getattr(output, "pooler_output", output)
        output = output if isinstance(output, list | tuple) else [output]
        tokens = torch.cat([feature.flatten(0, -2) for feature in output])
        return tokens.to(self.network.get_input_embeddings().weight)

    def _inputs(self, frames: Tensor) -> Mapping[str, Tensor]:
        if self._preprocess is not None:
            return self._preprocess(frames)
        frames = frames.to(self.network.device, self.network.dtype)
        if self.uses_grid:
            patches, grid = self._patches(frames)
            return {self._pixels: patches, "video_grid_thw": grid}
        return {self._pixels: frames[None] if self._batched_images else frames}

    def _patches(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Patches [times * rows * columns, channels * temporal_merge * side * side], merged ones adjacent, and the
        grid [1, 3]."""
        side, merge = self._vision.patch_size, self._vision.spatial_merge_size
        height, width = frames.shape[2:]
        if height % (side * merge) or width % (side * merge):
            raise DataError(
                f"frames of {height} x {width} pixels cannot be cut into patches of {side * merge}; resize them first."
            )
        times, rows, columns = len(frames) // self.temporal_merge, height // side, width // side
        cut = frames.reshape(times, self.temporal_merge, -1, rows // merge, merge, side, columns // merge, merge, side)
        cut = cut.permute(
            0, 3, 6, 4, 7, 2, 1, 5, 8
        )  # times, rows, columns, within a merge, channels, temporal_merge, pixels
        grid = torch.tensor([[times, rows, columns]], device=frames.device)
        return cut.reshape(times * rows * columns, -1), grid


def _is_variadic(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


_ZERO_FRAMES = "some networks take frames that are zero everywhere for padding, so normalize frames first"
