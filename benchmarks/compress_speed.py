"""A complete run: SmolLM2-135M, 20% of the blocks' parameters removed, on CPU.

    python benchmarks/compress_speed.py

Time and peak memory of the command in a separate process, the step's own time and memory, and the latency of the
pruned and the dense model, alternating: prefill of 128 tokens and decoding with a KV cache.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import table, write

from smelt.compression.recipe.plan import plan
from smelt.compression.recipe.recipe import Recipe
from smelt.measure.latency import compare_latency, decode_latency
from smelt.models.load import load

RECIPE = Path(__file__).parents[1] / "examples" / "prune-20.yaml"
ROUNDS = 5


def main() -> None:
    expected = plan("smollm2-135m", Recipe.load(RECIPE))
    with tempfile.TemporaryDirectory() as folder:
        run = _compress(Path(folder) / "small", Path(folder) / "run.json")
        new, base = load(Path(folder) / "small"), load("smollm2-135m")
        prefill = [compare_latency(new, base, batch=batch, length=128) for batch in (1, 8)]
        decoding = [[decode_latency(m, prompt=128, tokens=32).median_ms for m in (new, base)] for _ in range(ROUNDS)]
    new_ms, base_ms = (sorted(times)[ROUNDS // 2] for times in zip(*decoding, strict=True))
    step = run["record"]["steps"][0]
    rows = [
        ["whole command", f"{run['seconds']:.0f} s", f"{run['peak_bytes'] / 1e9:.2f} GB"],
        [
            "the step: gradients, search, repair",
            f"{step['seconds']:.0f} s",
            f"{step['peak_bytes'] / 1e9:.2f} GB",
        ],
        ["plan said", f"{expected.seconds:.0f} s", f"{expected.peak_memory / 1e9:.2f} GB"],
    ]
    speeds = [
        [f"prefill, 128 tokens, batch {p.new.batch}", f"{p.base.median_ms:.1f} ms", f"{p.new.median_ms:.1f} ms",
         f"{p.ratio:.2f} ({p.ratio_low:.2f}-{p.ratio_high:.2f})"]
        for p in prefill
    ]  # fmt: skip
    speeds.append(["decode step, batch 1", f"{base_ms:.1f} ms", f"{new_ms:.1f} ms", f"{base_ms / new_ms:.2f}"])
    text = (
        "# SmolLM2-135M, 20 % of the blocks' parameters removed, on the CPU\n\n"
        + table(["", "time", "peak memory"], rows)
        + "\n\n"
        + table(["latency, float32", "dense", "pruned", "speed-up (95 % interval)"], speeds)
    )
    content: dict[str, Any] = {"run": run, "decode_ms": {"new": new_ms, "base": base_ms}, "table": speeds}
    write("compress_speed", [content], text)


def _compress(out: Path, result: Path) -> dict[str, Any]:
    command = ["compress", "smollm2-135m", "-r", str(RECIPE), "-o", str(out), "--json", str(result)]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "smelt.cli.main", *command], check=True)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"seconds": seconds, "peak_bytes": peak, "record": json.loads(result.read_text())}


if __name__ == "__main__":
    main()
