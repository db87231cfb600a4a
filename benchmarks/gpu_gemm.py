"""Products with packed weights on a Hopper GPU, for every batch size of the engine, against bfloat16 in the same run.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_gemm.py [--formats int4/128@float16 ...] [--shapes 4096x4096 ...]
                                                           [--batches 1 16 ...] [--tune]

Times are medians of replays of a CUDA graph, divided by its calls; each call has its own copy of the matrix and of x,
together far larger than the cache. Rows with inputs in 8 bits leave out their quantization. `--tune` tries all tile
sizes instead of those that `choose_config` takes, and prints the best; kernels are compiled in parallel first. Rows of
int4 in groups of 128 also have PyTorch's own product with such weights, `_weight_int4pack_mm`, if the device has it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from common import copy_bandwidth, graph_seconds, table, write
from torch.nn import functional as F

from smelt.kernels.gpu import hopper, hopper_config, hopper_layout, hopper_source
from smelt.kernels.gpu.hopper_config import Config, StreamKConfig, fit_stages
from smelt.kernels.gpu.hopper_layout import Layout, ShuffledMatrix
from smelt.kernels.gpu.matrix import describe
from smelt.kernels.gpu.nvrtc import compile_to_cubin
from smelt.kernels.linear import PackedMatrix
from smelt.numerics import get_format

SEED, AT_LEAST = 0, 600e6  # bytes of matrices that the calls of a graph rotate over
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (6144, 4096), (28672, 4096)]  # rows, columns
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
FORMATS = {  # weights: dtype of the operands
    "int4/128@float16": torch.bfloat16,
    "int3/128@float16": torch.bfloat16,
    "int2/128@float16": torch.bfloat16,
    "int8/128@float16": torch.bfloat16,
    "mxfp4": torch.bfloat16,
    "nvfp4": torch.bfloat16,
    "nf4": torch.bfloat16,
    "int4-float32-zero/32": torch.bfloat16,  # Q4_K of GGUF
    "int5-float32-zero/32": torch.bfloat16,  # Q5_K
    "int6/16": torch.bfloat16,  # Q6_K
    "int4/32@float16": torch.bfloat16,  # Q4_0
    "int8/32@float16": torch.bfloat16,  # Q8_0
    "fp8-e4m3": torch.float8_e4m3fn,
    "int8/row": torch.int8,
    "int4/row": torch.int8,
}
TORCH_INT4, TORCH_INNER_TILES = "int4/128@float16", 8  # the rows beside which PyTorch's product stands; its layout
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, help="of matrices, such as 4096x14336")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--name", help="of the results file")
    options = parser.parse_args()
    if options.tune:
        compile_candidates(options)
    torch.manual_seed(SEED)
    copy = copy_bandwidth()
    rows: list[Row] = []
    for shape in options.shapes:
        dense = measure_dense(*shape, options.batches)
        peer = measure_torch_int4(*shape, options.batches) if TORCH_INT4 in options.formats else {}
        for name in options.formats:
            times = peer if name == TORCH_INT4 else {}
            rows += [
                {**row, "torch_int4_microseconds": times.get(row["batch"])}
                for row in measure(name, *shape, dense, copy, options.tune)
            ]
        write(options.name or ("gpu_gemm_tune" if options.tune else "gpu_gemm"), rows, text(rows, copy))


def _shape(name: str) -> tuple[int, int]:
    rows, _, columns = name.partition("x")
    return int(rows), int(columns)


def inputs(batch: int, columns: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    if dtype == torch.int8:
        return [torch.randint(-127, 128, (batch, columns), device="cuda", dtype=dtype) for _ in range(count)]
    return [torch.randn(batch, columns, device="cuda").to(dtype) for _ in range(count)]


def measure_dense(rows: int, columns: int, batches: list[int]) -> dict[int, float]:
    count = max(4, int(AT_LEAST / (2 * rows * columns)))
    weights = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    times = {}
    for batch in batches:
        xs = inputs(batch, columns, count, torch.bfloat16)
        times[batch] = graph_seconds([lambda x=x, w=w: F.linear(x, w) for x, w in zip(xs, weights, strict=True)])
    return times


def measure_torch_int4(rows: int, columns: int, batches: list[int]) -> dict[int, float]:
    """Return the microseconds of PyTorch's product with 4-bit weights in groups of 128, by batch; none without it."""
    count = max(4, int(2 * AT_LEAST / (rows * columns)))
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.rand(columns // 128, rows, 2, device="cuda", dtype=torch.bfloat16)  # and zero points
    times = {}
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, TORCH_INNER_TILES)
        weights = [packed.clone() for _ in range(count)]
        for batch in batches:
            xs = inputs(batch, columns, count, torch.bfloat16)
            calls = [
                lambda x=x, w=w: torch.ops.aten._weight_int4pack_mm(x, w, 128, scales)
                for x, w in zip(xs, weights, strict=True)
            ]
            times[batch] = 1e6 * graph_seconds(calls, 10)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        print(f"no int4 product of PyTorch: {str(error).splitlines()[0]}", flush=True)
    return times


def measure(name: str, rows: int, columns: int, dense: dict[int, float], copy: float, tune: bool) -> list[Row]:
    number_format, operands = get_format(name), FORMATS[name]
    quantized = number_format.quantize(torch.randn(rows, columns, device="cuda") * 0.05)
    matrix = describe(PackedMatrix(number_format, rows, columns, quantized.pack()))
    layout = hopper_layout.layout_of(matrix, operands)
    assert layout is not None
    weights = hopper_layout.shuffle(matrix, layout)
    count = max(4, int(AT_LEAST / weights.tiles.numel()))
    held = [replace(weights, tiles=weights.tiles.clone()) for _ in range(count)]
    results = []
    for batch in dense:
        xs = inputs(batch, columns, count, operands)
        times = {}
        for config in candidates(batch, weights) if tune else [None]:
            calls = [lambda x=x, w=w, c=config: product(x, w, c) for x, w in zip(xs, held, strict=True)]
            times[config] = graph_seconds(calls, 10)
        config, time = min(times.items(), key=lambda each: each[1])
        results.append({
            "format": name, "operands": layout.operands, "rows": rows, "columns": columns, "batch": batch,
            "microseconds": 1e6 * time, "against_bfloat16": dense[batch] / time,
            "share_of_copy": weights.tiles.numel() / time / copy, "config": None if config is None else str(config),
        })  # fmt: skip
        print(results[-1], flush=True)
    return results


def product(x: torch.Tensor, weights: ShuffledMatrix, config: Config | StreamKConfig | None) -> torch.Tensor:
    if config is None and len(x) == 1 and hopper.supports_gemv(weights.layout):
        return hopper.gemv(x, weights)
    return hopper.gemm(x, weights, dtype=torch.bfloat16, config=config)


def candidates(batch: int, weights: ShuffledMatrix) -> Iterator[Config | StreamKConfig]:
    layout, k_tiles = weights.layout, weights.tiles.shape[1]
    for config in all_configs(batch):
        fitted = fit_stages(config, layout, k_tiles)
        if fitted.shared_bytes(layout) <= 227 * 1024 and k_tiles // (config.split_k * config.k_tiles) >= 2:
            yield fitted
    if batch > 32 and not (layout.grouped and layout.operands == "int8"):
        yield from (
            hopper_config.stream_k_config(tile_n, layout) for tile_n in hopper_config.STREAM_K_N if tile_n < batch + 64
        )


def all_configs(batch: int) -> Iterator[Config]:
    if batch > 128:
        for tile_n, (rows, teams), split_k in itertools.product(
            hopper_config.WIDE_N, hopper_config.WIDE_TEAMS, (1, 2, 4)
        ):
            if rows * teams <= (4 if tile_n <= 128 else 2):
                yield Config(tile_n, rows, 1, 1, teams, 16, split_k, flush=False)
        return
    tile_n = next(size for size in hopper_config.TILE_N if size >= batch)
    rows = ((1, 1), (2, 1)) if tile_n < 64 else ((1, 1), (2, 1), (4, 2))
    for (row_tiles, m_tiles), k_tiles, teams, split_k in itertools.product(rows, (1, 2), (1, 2, 3, 4), (1, 2, 4)):
        if row_tiles // m_tiles * teams > (2 if tile_n > 64 else 4 if tile_n == 64 else 6):
            continue
        for flush in (True, False):
            yield Config(tile_n, row_tiles, m_tiles, k_tiles, teams, 16, split_k, flush, mma=tile_n <= 32)


def compile_candidates(options: argparse.Namespace) -> None:
    sources = set()
    for name, (rows, columns), batch in itertools.product(options.formats, options.shapes, options.batches):
        number_format = get_format(name)
        example = PackedMatrix(number_format, 64, 256, number_format.quantize(torch.randn(64, 256)).pack())
        layout = hopper_layout.layout_of(describe(example), FORMATS[name])
        assert isinstance(layout, Layout)
        tiles = torch.empty(rows // 64, columns // 128, 0, dtype=torch.uint8)
        for config in candidates(batch, ShuffledMatrix(layout, tiles, None, 1.0, rows, columns)):
            sources.add(hopper_source.kernel_source(layout, config, torch.bfloat16))
    with ProcessPoolExecutor() as pool:
        list(pool.map(_compile, sources, chunksize=8))


def _compile(source: str) -> None:
    compile_to_cubin(source, "hopper_gemm", "sm_90a")


def text(rows: list[Row], copy: float) -> str:
    cells = [
        [
            row["format"], row["operands"], f"{row['rows']} x {row['columns']}", str(row["batch"]),
            f"{row['microseconds']:.2f}", f"{row['against_bfloat16']:.2f}x", f"{row['share_of_copy']:.0%}",
            "" if row.get("torch_int4_microseconds") is None else f"{row['torch_int4_microseconds']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    headings = [
        "weights",
        "operands",
        "matrix",
        "batch",
        "time, us",
        "against bfloat16",
        "of copy bandwidth",
        "PyTorch's int4, us",
    ]
    return (
        f"# Products with packed weights on a Hopper GPU\n\nSeed {SEED}, random data; copy bandwidth "
        f"{copy / 1e12:.2f} TB/s, read and written. `of copy bandwidth` counts the bytes of the weights.\n\n"
        + table(headings, cells)
    )


if __name__ == "__main__":
    main()
