"""The CUDA sources of Hopper's kernels, with the definitions of a weight layout and its tiles."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import torch

from smelt.kernels.gpu.hopper_config import Config, GemvConfig, StreamKConfig
from smelt.kernels.gpu.hopper_layout import MAX_GROUPS, TILE_K, Layout

Grouping = Literal["", "grouped", "early"]  # of a GEMM: none; by a list of tiles; by one that is complete at the start


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
