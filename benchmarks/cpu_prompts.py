"""How fast the CPU engine reads prompts: SmolLM2-135M in float32, bfloat16, 8 and 4 bits.

    python benchmarks/cpu_prompts.py [--against CHECKOUT] [--rounds 3]

A prompt of random tokens is read in one request with one output token, without prefix caching; figures are medians of
the rounds, each of which has all formats and lengths. With `--against`, the rounds alternate with those of another
checkout, in the order A B B A; every round is a new process that imports one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
FORMATS = {"float32": None, "bfloat16": None, "int8": 8, "int4": 4}
LENGTHS = (64, 256, 1024)
GROUP = 64  # 576 inputs are not a multiple of 128
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another checkout of the source")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--name", default="cpu_prompts", help="of the results file")
    parser.add_argument("--round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.round:
        print("ROWS" + json.dumps([row for name in options.formats for row in measure(name, options)]))
        return
    from common import write

    trees = {"this": HERE, **({} if options.against is None else {"other": options.against.resolve()})}
    order = ["this"] if options.against is None else ["other", "this", "this", "other"]
    rates: dict[tuple[str, str, int], list[float]] = {}
    for name in order * options.rounds:
        for row in run_round(trees[name], options):
            rates.setdefault((name, row["format"], row["length"]), []).append(row["tokens_per_second"])
            print(name, row, flush=True)
    rows = [
        {"checkout": name, "format": number_format, "length": length, "tokens_per_second": statistics.median(values)}
        for (name, number_format, length), values in rates.items()
    ]
    write(options.name, rows, text(rows, options))


def run_round(tree: Path, options: argparse.Namespace) -> list[Row]:
    """Measure all formats and lengths once, with the source of a checkout."""
    paths = [tree / "src", HERE / "benchmarks"]
    settings = ["--model", options.model, "--formats", *options.formats, "--lengths", *map(str, options.lengths)]
    command = [sys.executable, __file__, "--round", *settings, "--threads", str(options.threads)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    if result.returncode:
        raise SystemExit(result.stderr[-2000:])
    rows: list[Row] = json.loads(result.stdout.partition("ROWS")[2].splitlines()[0])
    return rows


def measure(name: str, options: argparse.Namespace) -> list[Row]:
    import torch

    from smelt.serve.engine.engine import Engine
    from smelt.serve.engine.sampling_params import SamplingParams

    torch.set_num_threads(options.threads)
    engine = Engine(build(name, options.model), max_model_len=max(options.lengths) + 8, enable_prefix_caching=False)
    generator, rows = torch.Generator().manual_seed(0), []
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)

    def read(length: int) -> float:
        prompt = torch.randint(engine.vocab_size, (length,), generator=generator).tolist()
        start = time.perf_counter()
        engine.submit(prompt, sampling)
        while engine.busy:
            engine.step()
        return time.perf_counter() - start

    for length in options.lengths:
        read(length)
        seconds = min(read(length) for _ in range(3))  # other load on the machine only adds
        rows.append(
            {"format": name, "length": length, "tokens_per_second": length / seconds, "backend": engine.backend}
        )
    return rows


def build(name: str, source: str) -> Any:
    import torch

    from smelt.compression.base import MethodContext
    from smelt.compression.methods import METHODS
    from smelt.models.load import load

    model = load(source)
    if name != "float32":
        model.network.to(torch.bfloat16)
    if FORMATS[name] is not None:
        settings = {"method": "rtn", "bits": FORMATS[name], "group_size": GROUP, "symmetric": True}
        METHODS.build(settings).apply(model, MethodContext())
    return model


def text(rows: list[Row], options: argparse.Namespace) -> str:
    from common import table

    names = list(dict.fromkeys(row["checkout"] for row in rows))
    rate = {(row["checkout"], row["format"], row["length"]): row["tokens_per_second"] for row in rows}
    cells = []
    for number_format in options.formats:
        for length in options.lengths:
            speeds = [rate[name, number_format, length] for name in names]
            change = (
                []
                if len(names) < 2
                else [f"{rate['this', number_format, length] / rate['other', number_format, length]:.2f}x"]
            )
            cells.append([number_format, str(length), *(f"{speed:,.0f}" for speed in speeds), *change])
    headings = ["weights", "prompt tokens", *(f"tokens/s, {name} checkout" for name in names)]
    return (
        f"# Reading prompts on CPU: {options.model}\n\n"
        f"One prompt at a time in the engine, {options.threads} threads; 8 and 4 bits in groups of {GROUP}, round to "
        f"nearest. Medians of {options.rounds * (2 if len(names) > 1 else 1)} processes, each the best of three "
        "readings.\n\n" + table([*headings, *(["faster"] if len(names) > 1 else [])], cells)
    )


if __name__ == "__main__":
    main()
