"""The CPU engine before and after a change of the source: two checkouts, alternating, in the order A B B A.

    python benchmarks/serve/cpu_before_after.py --before CHECKOUT --gguf FILE [--rounds 2]

Each turn is a new process that imports one checkout only and runs its own `cpu_engine.py`. Nothing else should run
meanwhile. The prompts are random tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]
TURN = """
import json, sys
import torch
import cpu_engine
batches, gguf, threads = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(threads)
print("ROWS" + json.dumps(cpu_engine._ours(gguf, batches, torch.bfloat16)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, type=Path)
    parser.add_argument("--gguf", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    draw = random.Random(0)
    batches = [[[draw.randrange(1000, 40000) for _ in range(64)] for _ in range(count)] for count in (1, 16)]
    trees = {"before": options.before.resolve(), "after": HERE}
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for name in ("before", "after", "after", "before"):
            for row in _turn(trees[name], batches, options.gguf.resolve(), options.threads):
                rates.setdefault((name, row["streams"]), []).append(row["tokens_per_second"])
                print(name, row["streams"], f"{row['tokens_per_second']:.1f}", flush=True)
    for streams in (1, 16):
        before, after = (statistics.median(rates[name, streams]) for name in ("before", "after"))
        print(f"{streams} streams: {before:.1f} -> {after:.1f} tokens/s, medians of {2 * options.rounds}")


def _turn(tree: Path, batches: list[list[list[int]]], gguf: Path, threads: int) -> list[dict[str, float]]:
    paths = [tree / "src", tree / "benchmarks", tree / "benchmarks" / "serve"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", TURN, json.dumps(batches), str(gguf), str(threads)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    if result.returncode:
        raise SystemExit(result.stderr[-2000:])
    rows: list[dict[str, float]] = json.loads(result.stdout.partition("ROWS")[2].splitlines()[0])
    return rows


if __name__ == "__main__":
    main()
