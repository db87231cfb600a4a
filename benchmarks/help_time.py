"""Time `--help` of every command in a process of its own, beside importing torch alone.

In CPU seconds, which other work on the machine changes least; on an idle machine the wall clock shows about the same.

python benchmarks/help_time.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from common import table, write

from smelt.cli.app import COMMANDS


def cpu_seconds(command: list[str]) -> float:
    """Run a command; return its CPU seconds."""
    before = os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


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
        cpu_seconds(command)  # fills the page cache
        rows.append({"call": name, "cpu_seconds": statistics.median(cpu_seconds(command) for _ in range(repeats))})
    cells = [[f"`{row['call']}`", f"{row['cpu_seconds']:.2f}"] for row in rows]
    slowest = max((row for row in rows if row["call"].startswith("smelt")), key=lambda row: row["cpu_seconds"])
    write(
        "help_time",
        rows,
        f"# Time of --help\n\nMedian of {repeats} processes after one more. The slowest is `{slowest['call']}` with "
        f"{slowest['cpu_seconds']:.2f} s.\n\n{table(['call', 'CPU seconds'], cells)}",
    )


if __name__ == "__main__":
    main()
