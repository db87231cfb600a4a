"""Start of the engine on one GPU: load, rearrange the weights, compile, capture, each timed, by format.

    PYTHONPATH=src:benchmarks:benchmarks/serve python benchmarks/serve/gpu_startup.py --folder DISK [--shape 8b]
                                                                        [--models bf16 int4 w8a8-fp8] [--resume]

Models with random weights are written to DISK once, as `smelt compress` writes them. Every start is a new process, as
`smelt serve` starts its engine: the first with empty caches of compiled kernels (ours and Triton's), the others with
what the first left there. Files come from the page cache. `python` is the time to import everything.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from common import previous_rows, table, write

Item = TypeVar("Item")
PHASES = ("python", "load", "rearrange", "compile", "capture", "warm-up")
DESCRIPTIONS = {  # of the progress of a warm-up
    "compiling kernels": "compile",
    "capturing prompts": "capture",
    "capturing batch sizes": "capture",
    "warming up": "warm-up",
}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where models and kernel caches are kept")
    parser.add_argument("--shape", default="8b", choices=["tiny", "1b", "8b"])
    parser.add_argument("--models", nargs="+", default=["bf16", "int4", "w8a8-fp8"], help="names of gpu_formats.py")
    parser.add_argument("--warm-starts", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--resume", action="store_true", help="add to earlier rows")
    parser.add_argument("--name", default="serve_gpu_startup", help="of the results file")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)  # start an engine with the model in this folder
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)  # write a model into this folder
    options = parser.parse_args()
    if options.start is not None:
        print("TIMES" + json.dumps(start_engine(options.start, options.device)), flush=True)
    elif options.make is not None:
        make_model(options.make, options.shape, options.models[0], options.device)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    rows = previous_rows(options.name, options.resume)
    for name in options.models:
        folder = options.folder / f"{options.shape}-{name}"
        if not (folder / "smelt.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            call(options, "--make", folder, "--models", name)
        caches = options.folder / f"caches-{options.shape}-{name}"
        shutil.rmtree(caches, ignore_errors=True)
        for number in range(1 + options.warm_starts):
            rows.append({"shape": options.shape, "model": name, "cache": "warm" if number else "cold"})
            rows[-1] |= timed_start(options, folder, caches)
            print(rows[-1], flush=True)
            write(options.name, rows, text(rows))


def timed_start(options: argparse.Namespace, folder: Path, caches: Path) -> Row:
    begin = time.time()
    result = call(
        options, "--start", folder, SMELT_CACHE=str(caches / "smelt"), TRITON_CACHE_DIR=str(caches / "triton")
    )
    times: Row = json.loads(result.partition("TIMES")[2].splitlines()[0])
    times["seconds"]["python"] = times.pop("began") - begin
    return {**times, "total": sum(times["seconds"].values())}


def call(options: argparse.Namespace, *arguments: Any, **environment: str) -> str:
    """Run this script in a new process."""
    settings = ["--folder", options.folder, "--shape", options.shape, "--device", options.device]
    command = [sys.executable, __file__, *map(str, (*settings, *arguments))]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr[-3000:])
    return result.stdout


def make_model(folder: Path, shape: str, name: str, device: str) -> None:
    from gpu_engine import random_network
    from gpu_formats import VARIANTS, quantize_block

    from smelt.files import atomic_folder
    from smelt.models.artifact import save_artifact
    from smelt.models.model import Model

    network = random_network(shape, device)
    for index, block in enumerate(network.model.layers):
        quantize_block(block, VARIANTS[name], index)
    with atomic_folder(folder) as temporary:
        save_artifact(Model(network.to("cpu")), temporary)


class PhaseTimes:
    """A progress reporter that sums the seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def track(self, items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
        start = time.perf_counter()
        yield from items
        phase = DESCRIPTIONS[description]
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def start_engine(folder: Path, device: str) -> Row:
    """Start an engine and return the seconds of each phase, and when they began."""
    import torch

    from smelt.models.load import load
    from smelt.serve.engine.engine import Engine

    def synchronized() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    if device == "cuda":
        torch.cuda.init()
    began, start = time.time(), synchronized()
    model = load(str(folder), device=device, packed=True)
    loaded = synchronized()
    engine = Engine(model, max_model_len=1024, max_num_seqs=256, max_num_batched_tokens=8192)
    built, times = synchronized(), PhaseTimes()
    engine.warmup(progress=times)
    times.seconds["warm-up"] = synchronized() - built - sum(v for k, v in times.seconds.items() if k != "warm-up")
    return {
        "backend": engine.backend,
        "model_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "seconds": {"load": loaded - start, "rearrange": built - loaded, **times.seconds},
        "began": began,
    }


def text(rows: list[Row]) -> str:
    cells = [
        [
            row["shape"], row["model"], f"{row['model_bytes'] / 1e9:.1f} GB", row["cache"],
            *(f"{row['seconds'].get(phase, 0.0):.1f}" for phase in PHASES), f"{row['total']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    return (
        "# Start of the engine on one GPU\n\n"
        "Llama shapes with random weights, seconds until the engine can serve its first request, each start in a new "
        "process. `cold`: empty caches of compiled kernels; `warm`: those that the cold start left. Model files are in "
        "the page cache. `rearrange` builds the engine, which lays out packed weights for the kernels and allocates "
        "the KV cache.\n\n" + table(["shape", "model", "size", "kernel cache", *PHASES, "total, s"], cells)
    )


if __name__ == "__main__":
    main()
