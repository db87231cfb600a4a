"""Grouped GEMMs on Hopper GPUs: the shuffled weights of all experts of a layer in one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from smelt.kernels.gpu import hopper, hopper_config, hopper_layout, hopper_source
from smelt.kernels.gpu.activations import QuantizedRows, RowQuant
from smelt.kernels.gpu.arch import num_sms
from smelt.kernels.gpu.experts import Routing
from smelt.kernels.gpu.grouped import row_quant
from smelt.kernels.gpu.hopper_linear import shuffle_all
from smelt.kernels.linear import ActivationQuant, PackedMatrix


@dataclass(frozen=True)
class GroupedHopper:
    """Packed matrices of experts; inputs in half precision, or quantized to int8 or E4M3."""

    weights: hopper_layout.ShuffledMatrix  # stacked; its rows are those of one expert
    num_experts: int
    inputs: ActivationQuant | None
    tile_sizes: tuple[int, ...] = hopper_config.TILE_N

    @classmethod
    def stack(
        cls, experts: Sequence[Sequence[PackedMatrix]], inputs: ActivationQuant | None, dtype: torch.dtype
    ) -> GroupedHopper | None:
        """Shuffle and stack the matrices of experts, each in one or more parts of the same format; None if this GPU or
        the kernels do not support it. `inputs` has a static scale for each expert, if any."""
        one_scale = inputs
        if inputs is not None and inputs.scale is not None:
            one_scale = replace(inputs, scale=inputs.scale.flatten()[:1])
        stacked: list[hopper_layout.ShuffledMatrix] = []
        for parts in experts:
            matrices = shuffle_all(parts, one_scale, dtype)
            expert = None if matrices is None else hopper_layout.concatenate(matrices)
            if expert is None or (stacked and expert.layout != stacked[0].layout):
                return None
            stacked.append(expert)
        return cls(hopper_layout.stack(stacked), len(stacked), inputs)

    @property
    def rows(self) -> int:
        return self.weights.rows

    @cached_property
    def quant(self) -> RowQuant | None:
        return None if self.inputs is None else row_quant(self.inputs)

    def expert(self, index: int) -> hopper_layout.ShuffledMatrix:
        """Return the matrix of one expert, a view."""
        tiles, rows = len(self.weights.tiles) // self.num_experts, self.rows
        row_scale = self.weights.row_scale
        return replace(
            self.weights, tiles=self.weights.tiles[index * tiles : (index + 1) * tiles],
            row_scale=None if row_scale is None else row_scale[index * rows : (index + 1) * rows],
        )  # fmt: skip

    def __call__(self, x: Tensor | QuantizedRows, routing: Routing, *, shared: bool = False) -> Tensor:
        codes, x_scale, dtype = (x, None, x.dtype) if isinstance(x, Tensor) else (x.codes, x.scales, x.dtype)
        config = self.config(routing.num_tokens, routing.top_k, routing.tile_size)
        return hopper.grouped_gemm(
            codes, self.weights, routing, config, x_scale=x_scale, dtype=dtype, shared=shared, early=not shared
        )

    def config(self, num_tokens: int, top_k: int, tile_size: int) -> hopper_config.Config:
        """Return the tiles for a batch, from the number of tokens rounded up to a power of two: each other choice is
        another kernel to compile."""
        pairs = top_k * (1 << (num_tokens - 1).bit_length())
        touched = self.num_experts * (1 - (1 - 1 / self.num_experts) ** pairs)
        row_tiles, k_tiles = len(self.weights.tiles) // self.num_experts, self.weights.tiles.shape[1]
        return hopper_config.choose_grouped_config(
            tile_size, max(touched, pairs / tile_size), self.weights.layout, row_tiles, k_tiles,
            num_sms(self.weights.tiles.device),
        )  # fmt: skip

    def kernel_sources(self, num_tokens: int, top_k: int, tile_size: int, dtype: torch.dtype) -> set[str]:
        config = self.config(num_tokens, top_k, tile_size)
        groupings: tuple[hopper_source.Grouping, ...] = ("grouped", "early") if num_tokens == 1 else ("early",)
        return {hopper_source.kernel_source(self.weights.layout, config, dtype, grouping) for grouping in groupings}
