"""Products with packed weights on a Hopper GPU, for every batch size of the engine, against bfloat16 in the same run.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_gemm.py [--formats int4/128@float16 ...] [--tune]

Times are medians of replays of a CUDA graph, divided by its calls; each call has its own copy of the matrix and of x,
together far larger than the cache. Rows with inputs in 8 bits leave out their quantization. `--tune` tries all tile
sizes instead of those that `choose_config` takes, and prints the best; kernels are compiled in parallel first.
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

from smelt.kernels.gpu import hopper, hopper_layout
from smelt.kernels.gpu.hopper import Config, StreamKConfig, fit_stages
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
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    if options.tune:
        compile_candidates(options.formats)
    torch.manual_seed(SEED)
    copy = copy_bandwidth()
    rows: list[Row] = []
    for shape in SHAPES:
        dense = measure_dense(*shape)
        for name in options.formats:
            rows += measure(name, *shape, dense, copy, options.tune)
        write("gpu_gemm_tune" if options.tune else "gpu_gemm", rows, text(rows, copy))


def inputs(batch: int, columns: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    if dtype == torch.int8:
        return [torch.randint(-127, 128, (batch, columns), device="cuda", dtype=dtype) for _ in range(count)]
    return [torch.randn(batch, columns, device="cuda").to(dtype) for _ in range(count)]


def measure_dense(rows: int, columns: int) -> dict[int, float]:
    count = max(4, int(AT_LEAST / (2 * rows * columns)))
    weights = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    times = {}
    for batch in BATCHES:
        xs = inputs(batch, columns, count, torch.bfloat16)
        times[batch] = graph_seconds([lambda x=x, w=w: F.linear(x, w) for x, w in zip(xs, weights, strict=True)])
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
    for batch in BATCHES:
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
        yield from (hopper.stream_k_config(tile_n, layout) for tile_n in hopper.STREAM_K_N if tile_n < batch + 64)


def all_configs(batch: int) -> Iterator[Config]:
    if batch > 128:
        for tile_n, (rows, teams), split_k in itertools.product(hopper.WIDE_N, hopper.WIDE_TEAMS, (1, 2, 4)):
            if rows * teams <= (4 if tile_n <= 128 else 2):
                yield Config(tile_n, rows, 1, 1, teams, 16, split_k, flush=False)
        return
    tile_n = next(size for size in hopper.TILE_N if size >= batch)
    rows = ((1, 1), (2, 1)) if tile_n < 64 else ((1, 1), (2, 1), (4, 2))
    for (row_tiles, m_tiles), k_tiles, teams, split_k in itertools.product(rows, (1, 2), (1, 2, 3, 4), (1, 2, 4)):
        if row_tiles // m_tiles * teams > (2 if tile_n > 64 else 4 if tile_n == 64 else 6):
            continue
        for flush in (True, False):
            yield Config(tile_n, row_tiles, m_tiles, k_tiles, teams, 16, split_k, flush, mma=tile_n <= 32)


def compile_candidates(formats: list[str]) -> None:
    sources = set()
    for name, (rows, columns), batch in itertools.product(formats, SHAPES, BATCHES):
        number_format = get_format(name)
        example = PackedMatrix(number_format, 64, 256, number_format.quantize(torch.randn(64, 256)).pack())
        layout = hopper_layout.layout_of(describe(example), FORMATS[name])
        assert isinstance(layout, Layout)
        tiles = torch.empty(rows // 64, columns // 128, 0, dtype=torch.uint8)
        for config in candidates(batch, ShuffledMatrix(layout, tiles, None, 1.0, rows, columns)):
            sources.add(hopper.kernel_source(layout, config, torch.bfloat16))
    with ProcessPoolExecutor() as pool:
        list(pool.map(_compile, sources, chunksize=8))


def _compile(source: str) -> None:
    compile_to_cubin(source, "hopper_gemm", "sm_90a")


def text(rows: list[Row], copy: float) -> str:
    cells = [
        [
            row["format"], row["operands"], f"{row['rows']} x {row['columns']}", str(row["batch"]),
            f"{row['microseconds']:.2f}", f"{row['against_bfloat16']:.2f}x", f"{row['share_of_copy']:.0%}",
        ]
        for row in rows
    ]  # fmt: skip
    headings = ["weights", "operands", "matrix", "batch", "time, us", "against bfloat16", "of copy bandwidth"]
    return (
        f"# Products with packed weights on a Hopper GPU\n\nSeed {SEED}, random data; copy bandwidth "
        f"{copy / 1e12:.2f} TB/s, read and written. `of copy bandwidth` counts the bytes of the weights.\n\n"
        + table(headings, cells)
    )


if __name__ == "__main__":
    main()
