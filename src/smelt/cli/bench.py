"""`smelt bench`: measure latency and memory of the module, or throughput in the engine that serves it."""

from __future__ import annotations

import gc
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smelt.cli.output import (
    DeviceOption,
    JsonOption,
    ModelArgument,
    SeedOption,
    WorkloadOption,
    console,
    say,
    table,
    write_json,
)
from smelt.report.numbers import count, per_second, size

if TYPE_CHECKING:
    from smelt.measure.latency import Latency
    from smelt.serve.engine.throughput import RequestWorkload, Throughput

AgainstOption = Annotated[
    str | None, typer.Option("--against", metavar="BASE", help="Compare with this model, timed alternately.")
]


def run(
    model: ModelArgument,
    against: AgainstOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 128,
    repeats: Annotated[int, typer.Option(min=3, help="Number of timed calls.")] = 20,
    engine: Annotated[
        bool, typer.Option("--engine", help="Time the engine that `smelt serve` uses, at several batch sizes.")
    ] = False,
    workload: WorkloadOption = "chat",
    seconds: Annotated[float, typer.Option(min=1, help="With --engine: limit per model.")] = 60,
    device: DeviceOption = "auto",
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
    if engine:
        _bench_engine(model, against, workload, seconds, device, json_file, seed)
        return
    from smelt.measure.latency import compare_latency, decode_latency, latency
    from smelt.measure.machine import machine
    from smelt.measure.memory import PeakMemory
    from smelt.models.load import load

    with PeakMemory() as memory:
        loaded = load(model, device=device)
        timings = {"forward": latency(loaded, batch=batch_size, length=seq_len, repeats=repeats, seed=seed)}
        if loaded.task == "language":
            timings["decode step"] = decode_latency(loaded, prompt=seq_len, batch=batch_size, seed=seed)
    content: dict[str, Any] = {
        "model": model,
        "latency": {name: asdict(timing) for name, timing in timings.items()},
        "peak_bytes": memory.peak_bytes,
        "device_peak_bytes": memory.device_peak_bytes,
        "machine": machine(),
    }
    _show(model, timings)
    peak = memory.device_peak_bytes if device.startswith("cuda") else memory.peak_bytes
    console.print(f"peak memory {size(peak)} ({device}, weights and activations)")
    if against is not None:
        comparison = compare_latency(
            loaded, load(against, device=device), batch=batch_size, length=seq_len, repeats=repeats, seed=seed
        )
        content |= {"against": against, "comparison": asdict(comparison)}
        verdict = "faster" if comparison.ratio >= 1 else "slower (the ratio is below 1)"
        console.print(
            f"{comparison.ratio:.2f} times the speed of {against}, 95% interval "
            f"[{comparison.ratio_low:.2f}, {comparison.ratio_high:.2f}]: {verdict}"
        )
    write_json(json_file, content)


def _show(model: str, timings: dict[str, Latency]) -> None:
    rows = [
        [
            name,
            f"{t.median_ms:.2f} ms",
            f"{t.spread_ms:.2f} ms",
            count(t.tokens_per_second),
            str(t.batch),
            str(t.length),
        ]
        for name, t in timings.items()
    ]
    first = next(iter(timings.values()))
    title = f"{model} on {first.device}, {first.dtype}, {first.repeats} calls after {first.warmup} warmup calls"
    headings = ["measurement", "median", "spread (IQR)", "tokens/s", "batch", "length"]
    console.print(table(title, headings, rows))


def _bench_engine(
    model: str, against: str | None, workload: str, seconds: float, device: str, json_file: Path | None, seed: int
) -> None:
    from smelt.measure.machine import machine
    from smelt.serve.engine.throughput import compare_throughput, explain_slowdown, parse_workload

    lengths = parse_workload(workload)
    new = _measure(model, lengths, None, seconds, device, seed)
    content: dict[str, Any] = {"model": model, "engine": new.to_json(), "machine": machine()}
    _show_throughput(model, new)
    if against is not None:
        sizes = tuple(row.streams for row in new.rows)  # the KV cache of the base model may hold more or fewer
        base = _measure(against, lengths, sizes, seconds, device, seed)
        comparison, slowdown = compare_throughput(new, base), explain_slowdown(new, base)
        content |= {"against": against, "base": base.to_json(), "comparison": comparison, "slowdown": slowdown}
        _show_throughput(against, base)
        rows = [
            [f"{row['streams']:.0f}", f"{row['speedup']:.2f}x", f"{row['first_token_ratio']:.2f}x"]
            for row in comparison
        ]
        console.print(table(f"{model} against {against}", ["streams", "tokens/s", "time to first token"], rows))
        console.print(slowdown or "not slower at any batch size")
    write_json(json_file, content)


def _measure(
    source: str, workload: RequestWorkload, streams: tuple[int, ...] | None, seconds: float, device: str, seed: int
) -> Throughput:
    from smelt.serve.engine.throughput import measure_throughput

    say(f"loading {source} into an engine")
    result = measure_throughput(source, workload, device=device, seconds=seconds, seed=seed, streams=streams, say=say)
    gc.collect()  # an engine and its captured graphs refer to each other
    return result


def _show_throughput(model: str, result: Throughput) -> None:
    rows = [
        [
            str(row.streams),
            per_second(row.tokens_per_second),
            f"{row.first_token_ms:.1f} ms",
            f"{row.decode_ms:.2f} ms",
            f"{row.share_of_roofline:.0%}",
            "" if row.complete else "cut off, extrapolated",
        ]
        for row in result.rows
    ]
    title = f"{model} in the engine ({result.backend}) on {result.device}, {result.workload}"
    headings = ["streams", "tokens/s", "first token", "decode step", "of roofline", ""]
    console.print(table(title, headings, rows))
    layers = ", ".join(f"{number} {name}" for name, number in result.layers.items())
    console.print(f"linear layers: {layers}; started in {result.startup_seconds:.1f} s; the roofline is reading the")
    console.print(f"weights at the {result.copy_bandwidth / 1e9:,.0f} GB/s of a large copy")
    if result.skipped:
        console.print(f"skipped for lack of time: {', '.join(map(str, result.skipped))} streams; raise --seconds")
