"""`smelt bench`: measure latency and memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from smelt.cli.output import DeviceOption, JsonOption, ModelArgument, SeedOption, console, table, write_json
from smelt.measure.latency import Latency, compare_latency, decode_latency, latency
from smelt.measure.machine import machine
from smelt.measure.memory import PeakMemory
from smelt.models.load import load
from smelt.report.numbers import count, size

AgainstOption = Annotated[
    str | None, typer.Option("--against", metavar="BASE", help="Compare with this model, timed alternately.")
]


def run(
    model: ModelArgument,
    against: AgainstOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 128,
    repeats: Annotated[int, typer.Option(min=3, help="Number of timed calls.")] = 20,
    device: DeviceOption = "cpu",
    json_file: JsonOption = None,
    seed: SeedOption = 0,
) -> None:
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
