"""Products with packed matrices on Hopper GPUs: kernels are compiled, loaded and launched."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from smelt.kernels.gpu.hopper_config import (
    STREAM_K_N,
    Config,
    GemvConfig,
    StreamKConfig,
    choose_config,
    choose_gemv_config,
)
from smelt.kernels.gpu.hopper_layout import TILE_K, TILE_ROWS, Layout, ShuffledMatrix
from smelt.kernels.gpu.hopper_source import Grouping, dequantize_source, gemv_source, kernel_source
from smelt.kernels.gpu.nvrtc import CudaKernel, compile_to_cubin, tensor_map

if TYPE_CHECKING:  # needs Triton
    from smelt.kernels.gpu.activations import RowQuant
    from smelt.kernels.gpu.experts import Routing

ARCHITECTURE, GEMM_KERNEL = "sm_90a", "hopper_gemm"
STREAM_K_KERNEL = "hopper_stream_k"


def gemm(
    x: Tensor, weights: ShuffledMatrix, bias: Tensor | None = None, x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None, config: Config | StreamKConfig | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply x [batch, columns] of the operands' dtype -> [batch, rows] in `dtype`; x_scale is per row of x.

    `out`: where the results go, for example columns of a larger matrix.
    """
    batch = x.shape[0]
    dtype = dtype or x.dtype
    y = torch.empty(batch, weights.rows, dtype=dtype, device=x.device) if out is None else out
    assert y.shape == (batch, weights.rows) and y.dtype == dtype and (y.stride(1) == 1 or y.numel() == 0)
    if y.numel() == 0:
        return y
    config = config or choose_config(batch, weights, _num_sms(x.device))
    layout = weights.layout
    kernel = load_kernel(layout, config, dtype, x.device)
    panels = TILE_K * layout.operand_bytes // 128 * (1 if isinstance(config, StreamKConfig) else config.k_tiles)
    tensors = (
        tensor_map(x, config.tile_n, panels), _pointer(weights.tiles), _pointer(weights.row_scale), _pointer(x_scale),
        _pointer(bias), _pointer(y),
    )  # fmt: skip
    sizes = (
        ctypes.c_float(weights.factor), ctypes.c_int(batch), ctypes.c_int(weights.rows), ctypes.c_int(y.stride(0)),
        ctypes.c_int(weights.tiles.shape[1]),
    )  # fmt: skip
    if isinstance(config, StreamKConfig):
        parts, flags = stream_k_workspace(x.device)
        row_tiles, k_tiles = weights.tiles.shape[:2]
        blocks = config.blocks(batch, row_tiles, k_tiles, _num_sms(x.device))
        arguments = (*tensors, _pointer(parts), _pointer(flags), *sizes)
        kernel.launch((blocks, 1, 1), config.threads(), arguments, cluster=None)
        return y
    grid = -(-weights.rows // (TILE_ROWS * config.row_tiles)), -(-batch // config.tile_n), config.split_k
    cluster = (1, 1, config.split_k) if config.split_k > 1 else None
    kernel.launch(grid, config.threads(), (*tensors, *sizes), cluster=cluster)
    return y


def grouped_gemm(
    x: Tensor, weights: ShuffledMatrix, routing: Routing, config: Config, *, x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None, shared: bool = False, early: bool = False,
) -> Tensor:  # fmt: skip
    """Multiply each row of x [pairs, columns], sorted by expert, with the matrix of its expert -> [pairs, rows].

    `weights` are those of all experts, stacked; its rows are those of one. `shared`: all pairs have the one row of x.
    `early`: the list of `routing` is complete when this kernel starts: the one before has waited for it.
    """
    dtype = dtype or x.dtype
    y = torch.empty(routing.num_pairs, weights.rows, dtype=dtype, device=x.device)
    layout = weights.layout
    kernel = load_kernel(layout, config, dtype, x.device, "early" if early else "grouped")
    panels = TILE_K * layout.operand_bytes // 128 * config.k_tiles
    arguments = (
        tensor_map(x, config.tile_n, panels), _pointer(weights.tiles), _pointer(weights.row_scale), _pointer(x_scale),
        _pointer(None), _pointer(y), ctypes.c_float(weights.factor), ctypes.c_int(len(x)), ctypes.c_int(weights.rows),
        ctypes.c_int(y.stride(0)), ctypes.c_int(weights.tiles.shape[1]), _pointer(routing.tiles),
        _pointer(routing.num_tiles), ctypes.c_int(int(shared)),
    )  # fmt: skip
    grid = -(-weights.rows // (TILE_ROWS * config.row_tiles)), routing.max_tiles, config.split_k
    cluster = (1, 1, config.split_k) if config.split_k > 1 else None
    kernel.launch(grid, config.threads(), arguments, cluster=cluster)
    return y


def supports_gemv(layout: Layout) -> bool:
    return layout.operand_bytes == 2 or not layout.groups


def gemv(
    x: Tensor, weights: ShuffledMatrix, bias: Tensor | None = None, config: GemvConfig | None = None, *,
    quant: RowQuant | None = None, norm: Tensor | None = None, epsilon: float = 0.0, gated: bool = False,
    residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply x [1, columns] -> [1, rows], or [1, rows / 2] if gated, then half of the rows is a multiple of 64.

    `quant`: how x is quantized, for operands in 8 bits; `norm`: weight of an RMSNorm of x before that; `residual`:
    updated in place; `out`: where the results go otherwise.
    """
    layout, k_tiles = weights.layout, weights.tiles.shape[1]
    rows = weights.rows // 2 if gated else weights.rows
    y = residual if residual is not None else out
    if y is None:
        y = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    config = config or choose_gemv_config(weights, _num_sms(x.device), gated)
    scale_dtype = "float32" if quant is None else quant.scale_dtype
    kernel = _load_gemv(layout, config, norm is not None, residual is not None, k_tiles, scale_dtype, x.dtype, x.device)
    factor = weights.factor / 2 if layout.element == "e2m1" else weights.factor  # its codes are doubled
    arguments = (
        _pointer(x), _pointer(weights.tiles), _pointer(weights.row_scale), _pointer(bias), _pointer(y), _pointer(norm),
        ctypes.c_float(factor), ctypes.c_float(epsilon), ctypes.c_int(rows), ctypes.c_int(weights.columns),
        ctypes.c_int(k_tiles), _pointer(None if quant is None else quant.static_scale),
        ctypes.c_float(1.0 if quant is None else quant.clip_ratio),
        ctypes.c_float(1.0 if quant is None else quant.amax_code),
    )  # fmt: skip
    cluster = (1, config.split_k, 1) if config.split_k > 1 else None
    kernel.launch((-(-rows // TILE_ROWS), config.split_k, 1), 128 * config.k_groups + 32, arguments, cluster=cluster)
    return y


@cache
def _load_gemv(
    layout: Layout, config: GemvConfig, norm: bool, residual: bool, k_tiles: int, scale_dtype: str, dtype: torch.dtype,
    device: torch.device,
) -> CudaKernel:  # fmt: skip
    source = gemv_source(layout, config, norm, residual, k_tiles, scale_dtype, dtype)
    cubin = compile_to_cubin(source, "hopper_gemv", ARCHITECTURE)
    shared_bytes = config.shared_bytes(layout, k_tiles) - layout.lookup_bytes  # the table is not dynamic
    return CudaKernel.load(cubin, "hopper_gemv", device, shared_bytes)


def dequantize(weights: ShuffledMatrix) -> Tensor:
    """Dequantize to [rows, columns] in half precision; for 8-bit operands, return them, without scales."""
    layout = weights.layout
    dtype = getattr(torch, layout.operands)
    out = torch.empty(weights.rows, weights.columns, dtype=dtype, device=weights.tiles.device)
    arguments = (
        _pointer(weights.tiles), _pointer(weights.row_scale), _pointer(out), ctypes.c_float(weights.factor),
        ctypes.c_int(weights.rows), ctypes.c_int(weights.columns), ctypes.c_int(weights.tiles.shape[1]),
    )  # fmt: skip
    row_tiles, k_tiles = weights.tiles.shape[:2]
    load_dequantize(layout, out.device).launch((k_tiles, row_tiles, 1), 128, arguments, cluster=None, dependent=False)
    return out


@cache
def load_dequantize(layout: Layout, device: torch.device) -> CudaKernel:
    cubin = compile_to_cubin(dequantize_source(layout), "hopper_dequantize", ARCHITECTURE)
    return CudaKernel.load(cubin, "hopper_dequantize", device)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def stream_k_workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return room for one partial tile per block, and a flag for each that a launch leaves at zero.

    All launches of a device share it, so they must not run at the same time on two streams.
    """
    sms = _num_sms(device)
    size = max(STREAM_K_N) * TILE_ROWS * StreamKConfig.row_tiles
    return torch.empty(sms, size, device=device), torch.zeros(sms, dtype=torch.int32, device=device)


@cache
def load_kernel(
    layout: Layout, config: Config | StreamKConfig, dtype: torch.dtype, device: torch.device, grouping: Grouping = ""
) -> CudaKernel:
    name = STREAM_K_KERNEL if isinstance(config, StreamKConfig) else GEMM_KERNEL
    cubin = compile_to_cubin(kernel_source(layout, config, dtype, grouping), name, ARCHITECTURE)
    return CudaKernel.load(cubin, name, device, config.shared_bytes(layout) - layout.lookup_bytes)


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
