"""Cost of a threshold sparsifier's pass over memory: add the gradient to the residual, compare, compact.

    PYTHONPATH=src:benchmarks python benchmarks/gradient_cost.py [--device cpu] [--tune]

Random normal values; the threshold that the density's share of them exceeds is found by counting. The bytes that must
move are those of the gradient (read) and of the residual (read and written); their minimum time is at the bandwidth of
a large copy, on CPU of a large addition in place, measured first. On a GPU the kernel is timed inside a captured graph,
with a capacity of twice the target, as with `CompressionSettings(fixed_capacity=2)`; it rotates over more vectors than
the cache holds. PyTorch's own operations, and `torch.topk` of given magnitudes, are timed one by one between events.
On CPU there is one thread. Each result is compared with that of PyTorch's own operations before it is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from math import ceil
from time import perf_counter
from typing import Any

import torch
from common import copy_bandwidth, graph_seconds, table, write
from torch import Tensor

from smelt.kernels.threshold_select import add_and_select, select_backend

SEED, CAPACITY = 0, 2.0
SIZES = {"cuda": [25_000_000, 1_000_000_000], "cpu": [25_000_000]}
DENSITIES = [0.001, 0.01]
ROTATED = 10**9  # bytes of vectors to rotate over on a GPU
DRIFT = 1e-3  # of the residual's scale: a gradient is added in every repeat, and the density must stay
TILES = [(2048, 4), (4096, 4), (4096, 8), (8192, 4), (8192, 8), (8192, 16), (16384, 8), (16384, 16)]  # elements, warps
WORDS = [1024, 2048, 4096, 8192]
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    parser.add_argument("--sizes", type=float, nargs="*", help="elements; 25e6 and, on a GPU, 1e9")
    parser.add_argument("--tune", action="store_true", help="also time other tile sizes, on a GPU")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    on_cpu = options.device == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    bandwidth = cpu_bandwidth() if on_cpu else copy_bandwidth()
    print(f"{bandwidth / 1e9:.1f} GB/s", flush=True)
    rows: list[Row] = []
    for size in map(int, options.sizes or SIZES[options.device]):
        rows += measure(size, options.device, bandwidth, options.tune and not on_cpu)
        write("gradient_cost_cpu" if on_cpu else "gradient_cost", rows, _text(rows, bandwidth))
        if not on_cpu:
            torch.cuda.empty_cache()


def cpu_bandwidth() -> float:
    """Return bytes read and written per second by an addition in place: a copy also reads what it overwrites."""
    source, target = torch.randn(50_000_000), torch.randn(50_000_000)
    return 3 * source.nbytes / seconds(lambda: target.add_(source), "cpu", 25)


def seconds(call: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Return the median time of single calls, after one warmup call."""
    call()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        else:
            begin = perf_counter()
            call()
            times.append(perf_counter() - begin)
    return statistics.median(times)


def measure(size: int, device: str, bandwidth: float, tune: bool) -> list[Row]:
    """Return all rows of one size."""
    number = max(1, ROTATED // (8 * size)) if device == "cuda" else 1
    pairs = [(torch.randn(size, device=device), DRIFT * torch.randn(size, device=device)) for _ in range(number)]
    rows = []
    for density in DENSITIES:
        threshold, capacity = _threshold(pairs[0][0], density), ceil(CAPACITY * density * size)
        _check(pairs[0], threshold, capacity)

        def row(way: str, time: float, taken: bool = False, width: int = 12, density: float = density) -> Row:
            least = width * size / bandwidth
            result = {"elements": size, "density": density, "way": way, "taken": taken, "ms": 1e3 * time}
            result |= {"least_ms": 1e3 * least, "of_least": time / least}
            print(result, flush=True)
            return result

        rows.append(row("ours", _ours(pairs, threshold, capacity, device), True))
        if device == "cuda":
            rows.append(row("ours, the range of one of 8 ranks", _shared(pairs, threshold, capacity // 8)))
            half = [(residual, gradient.bfloat16()) for residual, gradient in pairs]
            rows.append(row("ours, gradient in bfloat16", _ours(half, threshold, capacity, device), width=10))
            del half
        if tune:
            rows += [row(f"ours, {text}", time) for text, time in _tuned(pairs, threshold, capacity)]
        rows.append(row("PyTorch's own operations", seconds(lambda t=threshold: _plain(*pairs[0], t), device)))
        magnitudes = pairs[0][0].abs()
        top = seconds(lambda m=magnitudes, d=density: m.topk(int(d * size), sorted=False), device, 3)
        rows.append(row("torch.topk alone", top))
        del magnitudes
    return rows


def _threshold(values: Tensor, density: float) -> float:
    """Find the threshold by bisection; of normal values."""
    low, high = 0.0, 10.0
    for _ in range(25):
        middle = (low + high) / 2
        above = int((values.abs() >= middle).sum()) > density * len(values)
        low, high = (middle, high) if above else (low, middle)
    return high


def _plain(residual: Tensor, gradient: Tensor, threshold: float) -> Tensor:
    """Synchronizes for the count, as it must without a capacity."""
    residual.add_(gradient)
    return torch.nonzero(residual.abs() >= threshold).flatten()


def _check(pair: tuple[Tensor, Tensor], threshold: float, capacity: int) -> None:
    """Check that the fast path is used and gives the same bits as the plain one."""
    residual, gradient = pair
    assert select_backend(residual) != "reference", "there is no kernel for this device"
    fast, plain = residual.clone(), residual.clone()
    indices = add_and_select(fast, gradient, threshold, 0, len(fast), capacity)
    expected = _plain(plain, gradient, threshold)
    count = len(expected)
    assert torch.equal(fast, plain), "different sums"
    assert count < capacity, f"{count} selected, target {capacity / CAPACITY:g}"
    assert torch.equal(indices[:count], expected), "different indices"
    assert bool((indices[count:] == len(fast)).all()), "padding is not the invalid index"


def _ours(pairs: list[tuple[Tensor, Tensor]], threshold: float, capacity: int, device: str) -> float:
    def call(residual: Tensor, gradient: Tensor) -> Tensor:
        return add_and_select(residual, gradient, threshold, 0, len(residual), capacity)

    if device == "cpu":
        return seconds(lambda: call(*pairs[0]), device, 25)
    return graph_seconds([lambda r=residual, g=gradient: call(r, g) for residual, gradient in pairs])


def _shared(pairs: list[tuple[Tensor, Tensor]], threshold: float, capacity: int) -> float:
    """Add everything, and compact the fourth of eight ranges."""
    size = len(pairs[0][0])
    start, stop = 3 * size // 8, 4 * size // 8
    return graph_seconds([lambda r=r, g=g: add_and_select(r, g, threshold, start, stop, capacity) for r, g in pairs])


def _tuned(pairs: list[tuple[Tensor, Tensor]], threshold: float, capacity: int) -> list[tuple[str, float]]:
    from smelt.kernels.gpu import threshold_select as kernel

    mine = kernel.words_per_program(len(pairs[0][0]) // kernel.BITS)
    ways = [(tiles, mine) for tiles in TILES] + [(kernel.TILES, words) for words in WORDS if words != mine]
    results = []
    for tiles, words in ways:
        calls = [
            lambda r=r, g=g, t=tiles, w=words: kernel.add_and_select(
                r, g, threshold, 0, len(r), capacity, tiles=t, words=w
            )
            for r, g in pairs
        ]
        results.append((f"tiles {tiles}, {words} words", graph_seconds(calls, repeats=5)))
    return results


def _text(rows: list[Row], bandwidth: float) -> str:
    cells = []
    for row in rows:
        ours = next(r for r in rows if r["taken"] and all(r[key] == row[key] for key in ("elements", "density")))
        cells.append(
            [
                f"{row['elements'] / 1e6:,.0f} M", f"{row['density']:g}", row["way"], f"{row['ms']:.3f}",
                f"{row['least_ms']:.3f}", f"{row['of_least']:.2f}x", f"{row['ms'] / ours['ms']:.2f}x",
            ]
        )  # fmt: skip
    return (
        "# Add the residual, compare, compact\n\n"
        f"Bandwidth {bandwidth / 1e9:,.1f} GB/s, read and written, of a copy (on a CPU: of an addition in place, one "
        "thread). The least time is that of reading gradient and residual and writing the residual at this bandwidth. "
        f"Capacity for {CAPACITY:g} times the target.\n\n"
        + table(["elements", "density", "how", "time, ms", "minimum, ms", "of the minimum", "of ours"], cells)
    )


if __name__ == "__main__":
    main()
