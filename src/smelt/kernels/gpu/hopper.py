"""Products with packed matrices on Hopper GPUs: tile sizes, kernel sources and launches."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from smelt.kernels.gpu.hopper_layout import MAX_GROUPS, TILE_K, TILE_ROWS, Layout, ShuffledMatrix
from smelt.kernels.gpu.nvrtc import CudaKernel, compile_to_cubin, tensor_map

if TYPE_CHECKING:  # needs Triton
    from smelt.kernels.gpu.activations import RowQuant
    from smelt.kernels.gpu.experts import Routing

ARCHITECTURE, GEMM_KERNEL = "sm_90a", "hopper_gemm"
STREAM_K_KERNEL = "hopper_stream_k"
TILE_N = (8, 16, 32, 64, 96, 128)  # rows of x per block
STREAM_K_N = (64, 96, 128, 160, 192, 224, 256)  # the same for stream-K
WIDE_N = (128, 144, 160, 192, 256)  # the same for more than 128 rows without stream-K
WIDE_TEAMS = ((1, 2), (2, 1), (3, 1), (1, 3), (2, 2))  # weight tiles of a block, teams of warpgroups
_SHARED_BYTES = 227 * 1024
Grouping = Literal["", "grouped", "early"]  # of a GEMM: none; by a list of tiles; by one that is complete at the start


@dataclass(frozen=True)
class Config:
    """The tiles of a launch."""

    tile_n: int  # rows of x
    row_tiles: int  # tiles of weight rows
    m_tiles: int  # of them, tiles of one warpgroup
    k_tiles: int  # tiles of columns in a step
    k_groups: int  # teams of warpgroups that take turns over the columns
    stages: int  # copies in flight
    split_k: int  # blocks of a cluster, each with a part of the columns
    flush: bool = True  # apply scales of integer groups to sums rather than to weights
    mma: bool = False  # products of single warps, for few rows of x

    def threads(self) -> int:
        warpgroups = self.row_tiles // self.m_tiles * self.k_groups
        return 128 * warpgroups + (128 if warpgroups == 2 and self.tile_n > 64 else 32)

    def shared_bytes(self, layout: Layout) -> int:
        stage = self.k_tiles * (self.tile_n * TILE_K * layout.operand_bytes + self.row_tiles * layout.tile_bytes)
        sums = self.k_groups * self.tile_n * (64 * self.row_tiles + 4) * 4
        return layout.lookup_bytes + max(self.stages * stage + 16 * self.stages, sums)


@dataclass(frozen=True)
class StreamKConfig:
    """The tiles of a stream-K launch; see Config."""

    tile_n: int
    stages: int
    row_tiles: int = 2

    def threads(self) -> int:
        return 128 * (self.row_tiles + 1)

    def shared_bytes(self, layout: Layout) -> int:
        return layout.lookup_bytes + self.stages * self.stage_bytes(layout)

    def stage_bytes(self, layout: Layout) -> int:
        return self.tile_n * TILE_K * layout.operand_bytes + self.row_tiles * layout.tile_bytes + 16

    def tiles(self, batch: int, row_tiles: int) -> int:
        """Return the number of output tiles."""
        return -(-row_tiles // self.row_tiles) * -(-batch // self.tile_n)

    def blocks(self, batch: int, row_tiles: int, k_tiles: int, num_sms: int) -> int:
        """Return the size of the grid: at most eight blocks per tile, since one of them adds up the others' sums."""
        return min(num_sms, self.tiles(batch, row_tiles) * min(8, k_tiles))


@dataclass(frozen=True)
class GemvConfig:
    """The tiles of a GEMV; see Config."""

    k_tiles: int
    k_groups: int
    stages: int
    split_k: int
    gated: bool = False  # tiles of two rows of tiles at a time
    prefetch: int = 4  # stages that are copied before x is there: with more, loads of x wait behind them

    def shared_bytes(self, layout: Layout, k_tiles: int) -> int:
        tiles, row_tiles = -(-k_tiles // (self.k_tiles * self.split_k)) * self.k_tiles, 2 if self.gated else 1
        x = 2 * (tiles * TILE_K + 16) + 36 * tiles
        stages = self.stages * (self.k_tiles * row_tiles * layout.tile_bytes + 16)
        return layout.lookup_bytes + max(stages + x, self.k_groups * row_tiles * 256)


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


def choose_gemv_config(weights: ShuffledMatrix, num_sms: int, gated: bool = False) -> GemvConfig:
    """Return the tiles of a GEMV, tuned on an H200."""
    row_tiles, k_tiles = weights.tiles.shape[:2]
    blocks, k_steps = (row_tiles // 2, 1) if gated else (row_tiles, 2)
    config = GemvConfig(k_steps, 4, 12, 2 if blocks <= 0.75 * num_sms and k_tiles >= 16 else 1, gated)
    limit = _SHARED_BYTES - 1024  # sums of squares
    if blocks > 1.36 * num_sms:
        config = GemvConfig(k_steps, 3, 9, 1, gated)
        limit //= 2 if weights.layout.lookup_bytes else 1  # loads from the table need the threads of two blocks
    teams = config.k_groups
    while config.stages > teams and config.shared_bytes(weights.layout, k_tiles) > limit:
        config = replace(config, stages=config.stages - teams)
    return replace(config, prefetch=6) if weights.layout.bits == 8 else config


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


def stream_k_config(tile_n: int, layout: Layout) -> StreamKConfig:
    """Return the tiles with as many copies in flight as shared memory holds."""
    stage = StreamKConfig(tile_n, 1).stage_bytes(layout)
    return StreamKConfig(tile_n, min(8, (_SHARED_BYTES - layout.lookup_bytes) // stage))


@dataclass(frozen=True)
class _Times:
    """Microseconds on an H200, from a least-squares fit to the times of six formats, five shapes and all tiles."""

    start: float  # of a block, its end included
    tile: float  # of a weight tile and its products
    tile_row: float  # the same, per row of x
    share: float  # of adding up the sums of blocks that share a tile, per tile_n


_TIMES = {  # without stream-K and with it; 8-bit weights leave it too little shared memory
    "4-bit": (_Times(7.6, 0.134, 2.18e-3, 3.0e-3), _Times(6.7, 0.171, 2.21e-3, 1.00e-2)),
    "8-bit": (_Times(3.2, 0.170, 1.98e-3, 1.3e-2), None),
    "8-bit inputs": (_Times(6.1, 0.048, 1.28e-3, 7.0e-3), _Times(7.0, 0.126, 1.16e-3, 1.20e-2)),
}


@lru_cache(maxsize=4096)
def _wide_config(batch: int, layout: Layout, row_tiles: int, k_tiles: int, num_sms: int) -> Config | StreamKConfig:
    """Return the tiles with the shortest estimated time for many rows of x, with and without stream-K."""
    kind = "8-bit inputs" if layout.operand_bytes == 1 else "8-bit" if layout.bits == 8 else "4-bit"
    plain, stream_k = _TIMES[kind]
    times: dict[Config | StreamKConfig, float] = {}
    for tile_n, (rows, teams), split_k in itertools.product(WIDE_N, WIDE_TEAMS, (1, 2)):
        config = fit_stages(Config(tile_n, rows, 1, 1, teams, 8, split_k, flush=False), layout, k_tiles)
        if rows * teams > (4 if tile_n <= 128 else 2) or config.shared_bytes(layout) > _SHARED_BYTES:
            continue
        waves = -(-(-(-row_tiles // rows) * -(-batch // tile_n) * split_k) // num_sms)
        products = rows * -(-k_tiles // split_k) * (plain.tile + plain.tile_row * tile_n)
        times[config] = waves * (plain.start + (split_k - 1) * plain.share * rows * tile_n + products)
    if stream_k is None:
        return min(times, key=times.__getitem__)
    for tile_n in STREAM_K_N:
        shared = stream_k_config(tile_n, layout)
        tiles, blocks = shared.tiles(batch, row_tiles), shared.blocks(batch, row_tiles, k_tiles, num_sms)
        products = -(-tiles * k_tiles // blocks) * shared.row_tiles * (stream_k.tile + stream_k.tile_row * tile_n)
        times[shared] = stream_k.start + products + stream_k.share * (blocks / tiles - 1) * tile_n
    return min(times, key=times.__getitem__)


def choose_config(batch: int, weights: ShuffledMatrix, num_sms: int) -> Config | StreamKConfig:
    """Return the tiles for a batch size, tuned on an H200 (`benchmarks/gpu_gemm.py --tune` tries them all).

    A block has 64 weight rows as long as that fills the GPU at most once; beyond, fewer and larger blocks read x less
    often. If even such blocks are too few, two share their columns. More than 128 rows of x take the tiles with the
    shortest estimated time.
    """
    layout, (row_tiles, k_tiles) = weights.layout, weights.tiles.shape[:2]
    tile_n = next((size for size in TILE_N if size >= batch), TILE_N[-1])
    two_sums = layout.grouped and layout.operands == "int8"  # of a group and of all: too many registers
    if batch > 128 and not two_sums:
        return _wide_config(batch, layout, row_tiles, k_tiles, num_sms)
    if tile_n >= 64 and row_tiles >= 3 * num_sms and layout.bits < 8 and layout.operand_bytes == 2:
        return stream_k_config(tile_n, layout)
    return _narrow_config(tile_n, row_tiles * -(-batch // tile_n), layout, k_tiles, num_sms)


def choose_grouped_config(
    tile_n: int, expert_tiles: float, layout: Layout, row_tiles: int, k_tiles: int, num_sms: int
) -> Config:
    """Return the tiles of a grouped GEMM for tiles of at most `tile_n` rows of x, of which `expert_tiles` are expected;
    a matrix of an expert has `row_tiles` x `k_tiles` tiles. Tuned on an H200 (`benchmarks/gpu_experts.py --tune`).

    The matrices are small and blocks many: with one warpgroup each, and a quarter of the shared memory, some copy while
    others end.
    """
    blocks = row_tiles * expert_tiles
    if tile_n > 32 or blocks <= 1.36 * num_sms:
        return _narrow_config(tile_n, blocks, layout, k_tiles, num_sms)
    config = Config(tile_n, 1, 1, 2 if tile_n < 32 else 1, 1, 16, 1, mma=layout.element != "e4m3")
    return fit_stages(config, layout, k_tiles, _SHARED_BYTES // 4)


def _narrow_config(tile_n: int, blocks: float, layout: Layout, k_tiles: int, num_sms: int) -> Config:
    """Return the tiles for at most 128 rows of x; with 64 weight rows per block there would be so many `blocks`."""
    split_k = 2 if blocks <= 0.6 * num_sms and k_tiles >= 16 else 1
    many, very_many = blocks > 1.36 * num_sms, blocks > 3 * num_sms
    limit = _SHARED_BYTES if tile_n >= 64 else _SHARED_BYTES // 2
    if tile_n <= 32:
        k_steps, teams = (2, 2) if many and tile_n < 32 else (1, 2) if many else (1, 4)
        config = Config(tile_n, 1, 1, k_steps, teams, 16, split_k, mma=layout.element != "e4m3")
    elif tile_n == 64:
        config = Config(64, 1, 1, 1, 3, 9, split_k)
        if many:
            rows, m_tiles, teams = (4, 2, 1) if very_many else (2, 1, 2)
            config = Config(64, rows, m_tiles, 1, teams, 8, 1, flush=False)
    else:
        config = Config(tile_n, 1, 1, 1, 2, 8, split_k, flush=False)
        if many:
            rows, m_tiles = (4, 2) if very_many else (2, 1)
            config = Config(tile_n, rows, m_tiles, 1, 1, 8, 1, flush=False)
    return fit_stages(config, layout, k_tiles, limit)


def fit_stages(config: Config, layout: Layout, k_tiles: int, limit: int = _SHARED_BYTES) -> Config:
    """Reduce the copies in flight to what shared memory holds and the columns need.

    Every team has its own stages: waiting for one that another team has not left yet would end too early.
    """
    teams = config.k_groups
    stages = min(config.stages, max(2, -(-k_tiles // (config.k_tiles * config.split_k)))) // teams * teams
    while stages > 2 * teams and replace(config, stages=stages).shared_bytes(layout) > limit:
        stages -= teams
    return replace(config, stages=max(stages, teams))


@cache
def load_kernel(
    layout: Layout, config: Config | StreamKConfig, dtype: torch.dtype, device: torch.device, grouping: Grouping = ""
) -> CudaKernel:
    name = STREAM_K_KERNEL if isinstance(config, StreamKConfig) else GEMM_KERNEL
    cubin = compile_to_cubin(kernel_source(layout, config, dtype, grouping), name, ARCHITECTURE)
    return CudaKernel.load(cubin, name, device, config.shared_bytes(layout) - layout.lookup_bytes)


def kernel_source(layout: Layout, config: Config | StreamKConfig, dtype: torch.dtype, grouping: Grouping = "") -> str:
    """Return the source of the GEMM with its definitions; `dtype` is that of the results; see `grouped_gemm`."""
    if isinstance(config, StreamKConfig):
        assert not (layout.grouped and layout.operands == "int8")
        shape = {
            "TILE_N": config.tile_n, "ROW_TILES": config.row_tiles, "STAGES": config.stages,
            "FOLD": int(layout.grouped), "SUM": "int" if layout.operands == "int8" else "float",
        }  # fmt: skip
        source = _read("hopper_stream_k.cu").replace("@PRODUCTS@", _products(layout, config.tile_n))
        return _source({**_definitions(layout, dtype), **shape}, source)
    flush = layout.grouped and (layout.operands == "int8" or (config.flush and _can_flush(layout, config)))
    integer = layout.operands == "int8"
    tiles = {
        "TILE_N": config.tile_n, "ROW_TILES": config.row_tiles, "M_TILES": config.m_tiles, "K_TILES": config.k_tiles,
        "K_GROUPS": config.k_groups, "STAGES": config.stages, "SPLIT_K": config.split_k, "MMA": int(config.mma),
        "FLUSH": int(flush), "FOLD": int(layout.grouped and not flush), "PART": "int" if integer else "float",
        "SUM": "int" if integer and not flush else "float", "GROUPED": int(grouping != ""),
        "EARLY": int(grouping == "early"),
    }  # fmt: skip
    if flush:
        tiles["GROUP_LOOPS"] = layout.groups
    source = _read("hopper_gemm.cu").replace("@PRODUCTS@", _products(layout, config.tile_n))
    return _source({**_definitions(layout, dtype), **tiles}, source)


def _can_flush(layout: Layout, config: Config) -> bool:
    """Whether scales can be applied to sums: a shift is no factor, and many groups only pay for few sums."""
    return not layout.shifts and (layout.groups < MAX_GROUPS or config.tile_n <= 16)


def gemv_source(
    layout: Layout, config: GemvConfig, norm: bool = False, residual: bool = False, k_tiles: int = 32,
    scale_dtype: str = "float32", dtype: torch.dtype = torch.bfloat16,
) -> str:  # fmt: skip
    """Return the source of a GEMV. Operands in 8 bits: x has `k_tiles` tiles of columns, and is of `dtype`."""
    tiles: dict[str, object] = {
        "K_TILES": config.k_tiles, "K_GROUPS": config.k_groups, "STAGES": config.stages, "SPLIT_K": config.split_k,
        "PREFETCH": min(config.prefetch, config.stages), "GATED": int(config.gated), "NORM": int(norm),
        "RESIDUAL": int(residual), "FOLD": 0, "DEFAULT_ZERO": layout.default_zero,
    }  # fmt: skip
    if layout.operand_bytes == 1:
        threads = 128 * config.k_groups + 32
        loads = -(-k_tiles * TILE_K // (4 * threads))
        tiles |= {"X_LOADS": loads, "X_SCALE_DTYPE": ("float32", "float16", "bfloat16").index(scale_dtype)}
    else:
        dtype = getattr(torch, layout.operands)
    values = _table_definitions(layout, torch.float16)  # whatever the dtype of x is
    return _source({**_definitions(layout, dtype), **values, **tiles}, _read("hopper_gemv.cu"))


def dequantize_source(layout: Layout) -> str:
    element = "u8" if layout.operand_bytes == 1 else "u16"
    dtype = torch.bfloat16 if layout.operand_bytes == 1 else getattr(torch, layout.operands)
    return _source({**_definitions(layout, dtype), "FOLD": 0, "ELEMENT_TYPE": element}, _read("hopper_dequantize.cu"))


def _definitions(layout: Layout, dtype: torch.dtype) -> dict[str, object]:
    """Return what the tiles depend on; `dtype` is the half-precision type of operands or results."""
    bf16 = (dtype if layout.operand_bytes == 1 else getattr(torch, layout.operands)) == torch.bfloat16
    lift = 0x4300 if bf16 else 0x6400
    zero = layout.default_zero
    offset = 0x4B000000 | zero if layout.bits == 8 and bf16 else (lift | zero) * 0x10001
    return {
        **_table_definitions(layout, torch.bfloat16 if bf16 else torch.float16),
        "FORMAT_INT": 0, "FORMAT_E2M1": 1, "FORMAT_E4M3": 2, "FORMAT_TABLE": 3,
        "FORMAT": f"FORMAT_{layout.element.upper()}", "BITS": layout.bits, "X_BYTES": layout.operand_bytes,
        "GROUPS": layout.groups, "GROUP_LOOPS": min(layout.groups, 4) if layout.grouped or layout.zeros else 1,
        "SCALE_BYTES": layout.scale_bytes, "SHIFTS": int(layout.shifts),
        "ZERO_BYTES": int(layout.zeros), "SCALE_IS_BF16": int(layout.scale_dtype == "bfloat16"),
        "SCALE_E4M3": int(layout.scale_dtype == "e4m3"), "SCALES": "uint2" if layout.groups == 8 else "u32",
        "ZERO_OFFSET": f"0x{offset:08X}u", "HALF_IS_BF16": int(bf16), "PAIR": '"bf16x2"' if bf16 else '"f16x2"',
    }  # fmt: skip


def _table_definitions(layout: Layout, dtype: torch.dtype) -> dict[str, object]:
    """Return the values of codes: the bits of half-precision numbers, and floats."""
    if not layout.table:
        return {}
    values = torch.tensor(layout.table)
    halves = values.to(dtype).view(torch.uint16).tolist()
    return {
        "TABLE_VALUES": ", ".join(f"0x{half:04X}" for half in halves),
        "TABLE_FLOATS": ", ".join(f"{value!r}f" for value in values.tolist()),
    }


def _source(definitions: dict[str, object], kernel: str) -> str:
    lines = [f"#define {name} {value}" for name, value in definitions.items()]
    return "\n".join([*lines, _read("hopper_common.cuh"), _read("hopper_tiles.cuh"), kernel])


@cache
def _read(name: str) -> str:
    return (Path(__file__).parent / "source" / name).read_text()


def _products(layout: Layout, tile_n: int) -> str:
    """Return the functions that add A (registers) times B to accumulators: of a warpgroup with B in shared memory, and
    of a warp with B in registers."""
    count = tile_n // 2
    kinds = {
        "bfloat16": ("k16", "f32.bf16.bf16", "p, 1, 1, 0", "float", "f"),
        "float16": ("k16", "f32.f16.f16", "p, 1, 1, 0", "float", "f"),
        "float8_e4m3fn": ("k32", "f32.e4m3.e4m3", "p, 1, 1", "float", "f"),
        "int8": ("k32", "s32.s8.s8", "p", "int", "r"),
    }
    depth, types, flags, accumulator, constraint = kinds[layout.operands]
    sums = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+{constraint}"(sums[{i}])' for i in range(count))
    registers = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])'
    four = ", ".join(f'"+{constraint}"(sums[{i}])' for i in range(4))
    return (
        f"__device__ __forceinline__ void wgmma({accumulator} (&sums)[{count}], const u32 (&a)[4], u64 b, int add) {{\n"
        f'    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 5}, 0;\\n"\n'
        f'        "wgmma.mma_async.sync.aligned.m64n{tile_n}{depth}.{types} {{{sums}}}, {{{operands}}}, %{count + 4}, '
        f'{flags};\\n}}"\n'
        f'        : {outputs} : {registers}, "l"(b), "r"(add));\n}}\n\n'
        f"__device__ __forceinline__ void mma({accumulator}* sums, const u32 (&a)[4], const u32* b) {{\n"
        f'    asm volatile("mma.sync.aligned.m16n8{depth}.row.col.{types}.{types[:3]} "\n'
        f'        "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"\n'
        f'        : {four} : {registers}, "r"(b[0]), "r"(b[1]));\n}}\n'
    )


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
