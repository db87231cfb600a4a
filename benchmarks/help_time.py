"""Time `--help` of every command in a process of its own: wall clock and CPU time, beside importing torch alone.

python benchmarks/help_time.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from common import table, write

from smelt.cli.app import COMMANDS


def timed(command: list[str]) -> tuple[float, float]:
    """Run a command; return its wall-clock and CPU seconds."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - start, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    smelt = [sys.executable, "-m", "smelt.cli.main"]
    calls = {"smelt --help": [*smelt, "--help"], "smelt -V": [*smelt, "-V"]}
    calls |= {f"smelt {name} --help": [*smelt, *name.split(), "--help"] for name in (*COMMANDS, "kv profile")}
    calls["python -c 'import torch'"] = [sys.executable, "-c", "import torch"]
    rows = []
    for name, command in calls.items():
        timed(command)  # fills the page cache
        walls, cpus = zip(*(timed(command) for _ in range(repeats)), strict=True)
        rows.append({"call": name, "seconds": statistics.median(walls), "cpu_seconds": statistics.median(cpus)})
    cells = [[f"`{row['call']}`", f"{row['seconds']:.2f}", f"{row['cpu_seconds']:.2f}"] for row in rows]
    slowest = max((row for row in rows if row["call"].startswith("smelt")), key=lambda row: row["seconds"])
    write(
        "help_time",
        rows,
        f"# Time of --help\n\nMedian of {repeats} processes after one more. The slowest is `{slowest['call']}` with "
        f"{slowest['seconds']:.2f} s.\n\n{table(['call', 'seconds', 'CPU seconds'], cells)}",
    )


if __name__ == "__main__":
    main()
