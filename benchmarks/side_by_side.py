"""Run benchmarks side by side on one GPU until a deadline; the networks of most grids leave it idle otherwise.

    PYTHONPATH=src:benchmarks python benchmarks/side_by_side.py benchmarks/gpu_lanes.txt --minutes 20 --folder FOLDER

Each line of the file is `lane: script.py options`. Scripts of a lane run one after the other and lanes at the same
time, under NVIDIA MPS where it is installed; those of the lane `alone` run after all others, for figures of speed.
`{folder}` in the options is a folder of the script below FOLDER. `--only` runs some of the lanes, where the data of
others is not there yet. No cell of a grid starts after the deadline, and what runs then is finished. The output of each
script is in FOLDER/logs.

To end a process early, tell MPS first (`terminate_client` in nvidia-cuda-mps-control): killing a client may fail the
others.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
ALONE = "alone"
Lanes = dict[str, list[list[str]]]  # commands by lane


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lanes", type=Path)
    parser.add_argument("--minutes", type=float, required=True, help="until no further cell starts")
    parser.add_argument("--folder", type=Path, required=True, help="for logs, networks and data")
    parser.add_argument("--only", nargs="+", help="lanes to run; default: all")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    lanes = read_lanes(options.lanes.read_text(), folder)
    if unknown := set(options.only or ()) - set(lanes):
        parser.error(f"{options.lanes} has no lane {', '.join(sorted(unknown))}")
    lanes = {name: commands for name, commands in lanes.items() if name in (options.only or lanes)}
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "SMELT_BENCHMARK_DEADLINE": str(time.time() + 60 * options.minutes)}
    if shutil.which("nvidia-cuda-mps-control"):
        environment |= {f"CUDA_MPS_{name}_DIRECTORY": str(folder / "mps") for name in ("PIPE", "LOG")}
        (folder / "mps").mkdir(exist_ok=True)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=False)
    begun = time.monotonic()
    last = lanes.pop(ALONE, [])
    with ThreadPoolExecutor(max(len(lanes), 1)) as pool:
        failed = sum(pool.map(lambda commands: run_lane(commands, environment, folder, begun), lanes.values()))
    failed += run_lane(last, os.environ | {"SMELT_BENCHMARK_DEADLINE": "inf"}, folder, begun)
    raise SystemExit(failed > 0)


def read_lanes(text: str, folder: Path) -> Lanes:
    """Return the commands of a file; their scripts must exist."""
    lanes: Lanes = {}
    for line in text.splitlines():
        name, colon, command = line.partition("#")[0].partition(":")
        if not command.strip():
            continue
        script, *arguments = shlex.split(command)
        if not colon or not (BENCHMARKS / script).is_file():
            raise SystemExit(f"{script} is no script of {BENCHMARKS.name}/")
        own = str(folder / Path(script).stem)
        arguments = [argument.replace("{folder}", own) for argument in arguments]
        lanes.setdefault(name.strip(), []).append([sys.executable, str(BENCHMARKS / script), *arguments])
    return lanes


def run_lane(commands: list[list[str]], environment: dict[str, str], folder: Path, begun: float) -> int:
    """Run commands one after the other; return how many failed, cells that were not started included."""
    failed = 0
    for command in commands:
        name = Path(command[1]).stem
        print(f"{time.monotonic() - begun:6.0f} s  {name} begins", flush=True)
        with (folder / "logs" / f"{name}.log").open("a") as log:
            code = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
        print(f"{time.monotonic() - begun:6.0f} s  {name} ends with {code}", flush=True)
        failed += code != 0
    return failed


if __name__ == "__main__":
    main()
