"""The layout of packed weights for Hopper's kernels.

`shuffle` turns a packed matrix into tiles of 64 rows x 128 columns, once, at load: the codes in the order in which
wgmma takes its left operand from registers, then scales and zero points (see source/hopper_tiles.cuh). The size grows
by padding at most (codes of 7 bits take 8, other tables than those of 4 bits take 4), and what is stored on disk does
not change.

Codes of 3, 5 and 6 bits are split into planes of 2 and 1, 4 and 1, or 4 and 2 bits. A fractional zero point becomes a
shift: scale * (code - default_zero) + shift. Such groups, and those of 16 columns, have scales and shifts in float16,
with a power of two per row that brings them into its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smelt.kernels.gpu.matrix import Matrix
from smelt.numerics.elements import E2M1
from smelt.numerics.packing import pack, unpack

HALF, E4M3 = (torch.bfloat16, torch.float16), torch.float8_e4m3fn
HOPPER = (9, 0)
TILE_ROWS, TILE_K = 64, 128
MAX_GROUPS = 8  # of a row in a tile
INTEGER_BITS = {2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 8, 8: 8}  # bits of a code: bits in the tiles
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}  # bits of a code: bits of its planes, the lowest first
_ROW_MAX = 15  # exponent of the largest magnitude in a row with a power-of-two factor


@dataclass(frozen=True)
class Layout:
    """What the kernel must know of the weights: everything that is compiled into it."""

    element: str  # int, e2m1, e4m3 or table
    bits: int
    operands: str  # dtype of both operands of wgmma: bfloat16, float16, int8 or float8_e4m3fn
    groups: int = 0  # scales (or zero points) of a row per tile; 0 if there are none in the tiles
    scale_dtype: str = ""  # of scales in the tiles: float16, bfloat16, float32, e4m3, e8m0; empty for per-row scales
    zeros: bool = False  # zero points are in the tiles
    default_zero: int = 0
    shifts: bool = False  # each scale in the tiles is followed by a shift: fractional zero points
    table: tuple[float, ...] = ()  # values of the codes, for `table`

    @property
    def scale_bytes(self) -> int:
        return {"": 0, "float32": 4, "e4m3": 1, "e8m0": 1}.get(self.scale_dtype, 2)

    @property
    def code_bytes(self) -> int:
        return TILE_ROWS * TILE_K * self.bits // 8

    @property
    def tile_bytes(self) -> int:
        size = self.code_bytes + TILE_ROWS * self.groups * (self.scale_bytes * (1 + self.shifts) + self.zeros)
        return -(-size // 128) * 128

    @property
    def grouped(self) -> bool:
        """Whether groups have scales that are not applied to single elements."""
        return self.element != "e2m1" and self.scale_dtype != ""

    @property
    def normalized(self) -> bool:
        """Whether scales are float16 numbers with a power of two per row."""
        return self.grouped and (self.shifts or self.groups == MAX_GROUPS)

    @property
    def lookup_bytes(self) -> int:
        """Bytes of shared memory for the values of two codes in half precision, in every bank."""
        return 256 * 4 * 32 if self.element == "table" else 0

    @property
    def operand_bytes(self) -> int:
        return 2 if self.operands in ("bfloat16", "float16") else 1


@dataclass(frozen=True)
class ShuffledMatrix:
    """Weights in the layout of the kernel."""

    layout: Layout
    tiles: Tensor  # uint8 [row tiles, column tiles, tile_bytes]
    row_scale: Tensor | None  # float32 [rows]
    factor: float  # of all results
    rows: int
    columns: int


def runs_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER


def layout_of(matrix: Matrix, operands: torch.dtype) -> Layout | None:
    """Return the layout of a matrix for operands of a dtype; None if the kernel does not support it."""
    name = str(operands).removeprefix("torch.")
    grouped = matrix.group_size > 0
    if matrix.columns * operands.itemsize % 128:  # x is copied in panels of 128 bytes
        return None
    if matrix.negative is not None or (grouped and (TILE_K % matrix.group_size and matrix.group_size % TILE_K)):
        return None
    groups = max(TILE_K // matrix.group_size, 1) if grouped else 0
    scale_dtype = str(matrix.scale.dtype).removeprefix("torch.") if grouped else ""
    if matrix.element == "int" and matrix.table is None:
        return _integer_layout(matrix, operands, groups, scale_dtype)
    if matrix.element == "e2m1" and operands in HALF and matrix.scale_dtype in ("e4m3", "e8m0"):
        if groups not in (4, 8) or (operands == torch.float16 and matrix.scale_dtype == "e8m0"):
            return None
        return Layout("e2m1", 4, name, groups, matrix.scale_dtype)
    if matrix.element in ("table", "e2m1") and matrix.bits <= 4 and operands in HALF and matrix.scale_dtype == "float":
        if groups > 4 or matrix.tensor is not None:
            return None
        return Layout("table", 4, name, groups, scale_dtype, table=_table(matrix))
    if matrix.element == "table" and matrix.bits == 8 and operands == E4M3 and matrix.scale_dtype == "float":
        return Layout("e4m3", 8, name, groups, scale_dtype) if groups <= 1 else None
    return None


def _table(matrix: Matrix) -> tuple[float, ...]:
    """Return the values of 16 codes; zero for those that nothing is rounded to."""
    values = E2M1.values if matrix.table is None else tuple(matrix.table.nan_to_num().tolist())
    return (*values, *[0.0] * (16 - len(values)))


def _integer_layout(matrix: Matrix, operands: torch.dtype, groups: int, scale_dtype: str) -> Layout | None:
    name = str(operands).removeprefix("torch.")
    if groups > MAX_GROUPS:
        return None
    if operands == torch.int8:
        if matrix.bits not in (4, 8) or matrix.zero is not None or groups == MAX_GROUPS:
            return None
        return Layout("int", matrix.bits, name, groups, scale_dtype)
    if operands not in HALF or matrix.bits not in INTEGER_BITS:
        return None
    bits = INTEGER_BITS[matrix.bits]
    if matrix.zero is not None and matrix.zero.dtype != torch.uint8:
        return Layout("int", bits, name, max(groups, 1), "float16", False, matrix.default_zero, shifts=True)
    zeros = matrix.zero is not None
    if groups == MAX_GROUPS:
        scale_dtype = "float16"
    return Layout("int", bits, name, max(groups, int(zeros)), scale_dtype, zeros, matrix.default_zero)


def shuffle(matrix: Matrix, layout: Layout) -> ShuffledMatrix:
    """Rearrange a packed matrix for the kernel."""
    codes = unpack(matrix.codes, matrix.bits, matrix.columns)
    fill = matrix.default_zero if layout.operands in ("bfloat16", "float16") else 128 if layout.element == "int" else 0
    if layout.operands == "int8":
        codes = codes ^ (1 << (layout.bits - 1)) if matrix.default_zero == 1 << (layout.bits - 1) else codes
        fill = 0
    padding = (0, -matrix.columns % TILE_K, 0, -matrix.rows % TILE_ROWS)
    padded = torch.nn.functional.pad(codes, padding, value=fill)
    tiles = padded.unflatten(0, (-1, TILE_ROWS)).unflatten(2, (-1, TILE_K)).transpose(1, 2)  # [tiles, k tiles, 64, 128]
    parts = [_fragment_bytes(tiles.flatten(0, 1), layout)]
    row_tiles, k_tiles = tiles.shape[:2]
    row_scale = None
    if layout.normalized:
        scales, row_scale = _normalized_scales(matrix, codes, layout)
        arranged = [_tile_parameters(each, matrix, layout, row_tiles, k_tiles, 0) for each in scales]
        parts.append(torch.stack(arranged, dim=-1))
    elif layout.scale_dtype:
        parts.append(_tile_parameters(matrix.scale, matrix, layout, row_tiles, k_tiles, 0))
    else:
        row_scale = matrix.scale.float().reshape(-1).expand(matrix.rows).contiguous()
    if layout.zeros:
        assert matrix.zero is not None
        parts.append(_tile_parameters(matrix.zero, matrix, layout, row_tiles, k_tiles, matrix.default_zero))
    flat = torch.cat([part.contiguous().flatten(1).view(torch.uint8) for part in parts], dim=1)
    flat = torch.nn.functional.pad(flat, (0, layout.tile_bytes - flat.shape[1]))
    factor = 1.0 if matrix.tensor is None else 1.0 / float(matrix.tensor)
    if layout.operands == "int8" and layout.bits == 4:
        factor /= 16.0  # codes are multiplied in the high half of a byte
    return ShuffledMatrix(layout, flat.reshape(row_tiles, k_tiles, -1), row_scale, factor, matrix.rows, matrix.columns)


def concatenate(parts: Sequence[ShuffledMatrix]) -> ShuffledMatrix | None:
    """Stack the rows of matrices with the same layout and columns; None if a tile would have rows of two matrices."""
    first = parts[0]
    if any(part.rows % TILE_ROWS for part in parts[:-1]):
        return None
    row_scale, factor = first.row_scale, first.factor
    if row_scale is not None or any(part.factor != factor for part in parts):
        factor = 1.0
        row_scale = torch.cat([part.factor * _row_scale(part) for part in parts])
    rows = sum(part.rows for part in parts)
    return replace(
        first, tiles=torch.cat([part.tiles for part in parts]), row_scale=row_scale, factor=factor, rows=rows
    )


def stack(experts: Sequence[ShuffledMatrix]) -> ShuffledMatrix:
    """Stack matrices of experts, of the same shape and layout. The rows stay those of one; only tiles and scales are
    those of all."""
    first = experts[0]
    row_scale, factor = None, first.factor
    if first.row_scale is not None or any(expert.factor != factor for expert in experts):
        factor = 1.0
        row_scale = torch.cat([expert.factor * _row_scale(expert) for expert in experts])
    return replace(first, tiles=torch.cat([expert.tiles for expert in experts]), row_scale=row_scale, factor=factor)


def _row_scale(part: ShuffledMatrix) -> Tensor:
    return torch.ones(part.rows, device=part.tiles.device) if part.row_scale is None else part.row_scale


def _normalized_scales(matrix: Matrix, codes: Tensor, layout: Layout) -> tuple[list[Tensor], Tensor]:
    """Return scales, then shifts if there are any, in float16 [rows, groups], and the factor of each row: a power of
    two that brings its largest possible magnitude to 2^_ROW_MAX."""
    scale = _per_group(matrix.scale, matrix)
    zero = matrix.default_zero if matrix.zero is None else _per_group(matrix.zero, matrix)
    # A group with a single code: the sum of a scale times a code and a shift would lose a small value to rounding, and
    # the scale of a group of zeros, which is one, would set the factor of the row
    low, high = _code_range(codes, matrix.group_size or matrix.columns)
    if layout.shifts:
        shift = scale * torch.where(low == high, low - zero, layout.default_zero - zero)
        scale = torch.where(low == high, 0, scale)
    else:
        shift = torch.zeros_like(scale)
        scale = torch.where((low == zero) & (high == zero), 0, scale)
    amax = (scale.abs() * (1 << matrix.bits) + shift.abs()).nan_to_num(0.0, 0.0, 0.0).amax(dim=1, keepdim=True)
    exponent = torch.frexp(amax).exponent.where(amax > 0, _ROW_MAX) - _ROW_MAX
    exponent = exponent.clamp(-100, 100)  # powers of two and their inverses are normal numbers
    scales = [torch.ldexp(each, -exponent).half() for each in ((scale, shift) if layout.shifts else (scale,))]
    return scales, torch.ldexp(torch.ones_like(amax), exponent).flatten()


def _per_group(tensor: Tensor, matrix: Matrix) -> Tensor:
    """Return parameters as float32 [rows, groups]; all rows may share them."""
    return tensor.float().reshape(tensor.shape[0], -1).expand(matrix.rows, -1)


def _code_range(codes: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest code of each group, [rows, groups]."""
    padding = codes[:, -1:].expand(-1, -codes.shape[1] % group_size)
    grouped = torch.cat([codes, padding], dim=1).unflatten(1, (-1, group_size))
    return grouped.amin(dim=2).float(), grouped.amax(dim=2).float()


def _tile_parameters(
    tensor: Tensor, matrix: Matrix, layout: Layout, row_tiles: int, k_tiles: int, fill: int
) -> Tensor:  # [tiles, 64, groups]
    """Arrange per-group parameters [rows, groups (, 1)] by tiles; a group wider than a tile is repeated."""
    values = tensor.reshape(tensor.shape[0], -1).expand(matrix.rows, -1)
    if matrix.group_size == 0:
        values = values.expand(matrix.rows, k_tiles)
    elif matrix.group_size > TILE_K:
        values = values.repeat_interleave(matrix.group_size // TILE_K, dim=1)[:, :k_tiles]
    padding = (0, k_tiles * layout.groups - values.shape[1], 0, row_tiles * TILE_ROWS - matrix.rows)
    padded = torch.nn.functional.pad(values, padding, value=fill)
    return padded.reshape(row_tiles, TILE_ROWS, k_tiles, layout.groups).transpose(1, 2).flatten(0, 1)


def _fragment_bytes(codes: Tensor, layout: Layout) -> Tensor:
    """Arrange codes [tiles, 64, 128] as wgmma fragments: bytes [tiles, code_bytes], 16 bytes of a thread at a time.

    Thread t of a warpgroup has rows 16 * (t // 32) + t % 32 // 4 (+ 8), and in each step of the instruction, per
    register, as many neighboring columns as fit into four bytes.
    """
    per_register = 4 // layout.operand_bytes  # 2 or 4 columns
    # rows: warp 4, half 2, group 8; columns: step, half 2, quad 4, within a register
    x = codes.reshape(-1, 4, 2, 8, TILE_K // (8 * per_register), 2, 4, per_register)
    # -> tile, warp, group, quad (the thread), step, register (column half, row half), column in the register
    x = x.permute(0, 1, 3, 6, 4, 5, 2, 7)
    steps = x.shape[4]
    x = x.reshape(-1, 128, steps, 4, per_register)
    if layout.operand_bytes == 1:
        if layout.bits == 8:
            return _by_words(x.reshape(len(x), 128, -1), 16)
        pairs = x.reshape(len(x), 128, steps, 2, 2, 4)  # registers 0, 1 share the bytes of a word: low half, high half
        return _by_words((pairs[..., 0, :] | (pairs[..., 1, :] << 4)).reshape(len(x), 128, -1), 16)
    if layout.bits == 8:  # bytes in order: registers 0, 0, 1, 1, 2, 2, 3, 3
        return _by_words(x.reshape(len(x), 128, -1), 16)
    if layout.element == "table":  # a byte has the codes of a register, which are looked up together
        return _by_words(pack(x.reshape(len(x), 128, -1), 4), 16)
    planes, start = [], 0
    for bits in _PLANES[layout.bits]:
        plane = _plane((x >> start) & ((1 << bits) - 1), bits)
        planes.append(_by_words(plane, min(16, plane.shape[2])))
        start += bits
    return torch.cat(planes, dim=1)


def _plane(x: Tensor, bits: int) -> Tensor:
    """Pack codes [tiles, 128, steps, register, 2] into 32-bit words: the first of each pair in the low half.

    A byte has the codes of one column: for 4 / bits steps, those of both rows of the thread. So a shift and a mask
    select four columns of a row as bytes.
    """
    words = x.reshape(len(x), 128, -1, 4 // bits, 2, 2, 2)  # step, column half, row half, column in the register
    words = words.permute(0, 1, 2, 6, 4, 3, 5).contiguous()
    return pack(words.flatten(3), bits).flatten(2)


def _by_words(x: Tensor, size: int) -> Tensor:
    """Interleave the bytes [tiles, 128, bytes] of threads, `size` at a time, so that a warp reads neighbors."""
    return x.reshape(len(x), 128, -1, size).transpose(1, 2).reshape(len(x), -1)
