"""Speed and memory of hashing a folder, against Python's own `hashlib.file_digest` on the same files.

Each measurement runs in a new process, in turns, on random files that the first pass has read into the page cache.
Speed is given in elapsed time and in CPU time: the second one hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import table, write

from smelt.subprocesses import python_command, python_environment

GB = 10**9
MB = 10**6
LAYOUTS = ((0.5, 1), (2.0, 1), (2.0, 4))  # GB, files
WAYS = {
    "smelt": "from smelt.fingerprint import hash_folder\nhash_folder(folder)",
    "file_digest": (
        "import hashlib\nfor path in sorted(folder.iterdir()):\n"
        "    with path.open('rb') as file:\n        hashlib.file_digest(file, 'sha256').hexdigest()"
    ),
}
PROGRAM = """
import json, re, sys, time
from pathlib import Path
import smelt.fingerprint  # both ways start from the same imports
folder = Path(sys.argv[1])
def peak_bytes():  # getrusage would count the process that started this one
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak_bytes()
start, cpu = time.perf_counter(), time.process_time()
{body}
seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({{"seconds": seconds, "cpu_seconds": cpu_seconds, "added_bytes": peak_bytes() - before}}))
"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--folder", help="where the files are written, and removed again")
    options.add_argument("--repeats", type=int, default=3)
    chosen = options.parse_args()
    rows = []
    for size, files in LAYOUTS:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as temporary:
            folder = Path(temporary)
            fill(folder, round(size * GB), files)
            measure(folder, "file_digest")  # read everything once
            results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for _ in range(chosen.repeats):
                for way in WAYS:
                    results[way].append(measure(folder, way))
            rows += [summary(way, size, files, measured) for way, measured in results.items()]
            print(rows[-2:], file=sys.stderr)
    headings = ["way", "folder", "GB/s", "GB per CPU second", "memory added"]
    lines = [
        [row["way"], f"{row['gigabytes']:g} GB in {row['files']} file{'s' * (row['files'] > 1)}",
         f"{row['gb_per_second']:.2f}", f"{row['gb_per_cpu_second']:.2f}", f"{row['added_bytes'] / MB:.0f} MB"]
        for row in rows
    ]  # fmt: skip
    text = f"""# Hashing a folder (sha256)

Median of {chosen.repeats} runs in turns, each in a new process, files in the page cache; memory is the maximum.
`smelt` is `hash_folder`, with one thread per file and at most 4; `file_digest` is `hashlib.file_digest`, one file after
the other. One file is hashed by one thread, so its speed is that of sha256 on one core.

{table(headings, lines)}
"""
    write("hashing", rows, text)


def fill(folder: Path, size: int, files: int) -> None:
    """Write files of random bytes; a block of 64 MB is repeated, which sha256 does not notice."""
    block = os.urandom(64 * MB)
    for number in range(files):
        with (folder / f"{number}.bin").open("wb") as file:
            left = size // files
            while left:
                left -= file.write(block[: min(left, len(block))])


def measure(folder: Path, way: str) -> dict[str, float]:
    command = python_command("-c", PROGRAM.format(body=WAYS[way]), str(folder))
    done = subprocess.run(command, env=python_environment(), capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def summary(way: str, size: float, files: int, measured: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "way": way,
        "gigabytes": size,
        "files": files,
        "gb_per_second": size / statistics.median(run["seconds"] for run in measured),
        "gb_per_cpu_second": size / statistics.median(run["cpu_seconds"] for run in measured),
        "added_bytes": max(run["added_bytes"] for run in measured),
        "runs": measured,
    }


if __name__ == "__main__":
    main()
