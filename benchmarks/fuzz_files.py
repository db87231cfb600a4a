"""Feed mutated files to the readers that users' commands reach, and count how each ends.

    python benchmarks/fuzz_files.py --files 50000 --store        # all kinds, results page; --state DIR to continue it
    python benchmarks/fuzz_files.py --kind yaml --index 1234     # one file again, in this process, with its traceback

Every file is a function of seed, kind and index. Workers are forked from a process with all imports done; each reads
many files, under a limit on address space, with a CPU timer per file whose signal kills the worker even inside of
native code. A worker that dies is replaced and goes on with the next file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_mutate as mutate
import torch
import yaml
from fuzz_seeds import SEED_KINDS, write_seeds

from smelt.errors import SmeltError

OUTCOMES = ("read", "refused", "exception", "crash", "hang", "memory")
BUGS = OUTCOMES[2:]
CPU_SECONDS = 10  # per file
WALL_SECONDS = 120  # per file: only something that waits forever takes so long
HEADROOM = 2 * 2**30  # address space of a worker beyond what it has at the start
MAX_GROWTH = 512 * 2**20  # resident memory that one file may take
BATCH = 500  # files of one worker
OWN_ERROR = 70  # exit code of a worker when this script fails, not a reader


@dataclass
class Tally:
    """How the files of one kind ended."""

    counts: Counter[str] = field(default_factory=Counter)
    cpu_seconds: float = 0.0
    slowest: float = 0.0
    largest: int = 0  # bytes of resident memory that one file added
    bugs: list[dict[str, Any]] = field(default_factory=list)

    def add(self, result: dict[str, Any]) -> None:
        self.counts[result["outcome"]] += 1
        self.cpu_seconds += result["cpu"]
        self.slowest = max(self.slowest, result["cpu"])
        self.largest = max(self.largest, result["growth"])
        if result["outcome"] in BUGS:
            self.bugs.append(result)


Reader = Callable[[Path], object]


def read_model(folder: Path) -> object:
    from smelt.models.load import load

    return _encode(load(folder).tokenizer)


def read_gguf_model(folder: Path) -> object:
    from smelt.models.load import load

    return _encode(load(folder / "model.gguf").tokenizer)


def read_tokenizer(folder: Path) -> object:
    from smelt.models.tokenizer import load_tokenizer_only

    return _encode(load_tokenizer_only(folder))


def _encode(tokenizer: Any) -> object:
    return tokenizer and tokenizer("The 12 words, then é 語 😀.", truncation=True, max_length=64)


def read_yaml_file(folder: Path) -> object:
    from smelt.cli.serve import read_serve_config
    from smelt.compression.recipe.recipe import Recipe
    from smelt.train.trainer.config import TrainConfig

    if (folder / "recipe.yaml").exists():
        return Recipe.load(folder / "recipe.yaml")
    if (folder / "train.yaml").exists():
        return TrainConfig.load(folder / "train.yaml")
    return read_serve_config(folder / "serve.yaml", {})


def read_table(folder: Path) -> object:
    """Decode in this process, which is itself a subprocess with a limit; every 25th file as users do."""
    from smelt.data import load_data

    path = folder / "rows.parquet"
    if path.stat().st_ino % 25 == 0:
        return load_data(path)
    return _decode_parquet(path)


def _decode_parquet(path: Path) -> object:
    import pyarrow
    from pyarrow import parquet

    from smelt.data import parquet_process
    from smelt.errors import DataError

    rows = 0
    try:
        with path.open("rb") as stream:
            file = parquet.ParquetFile(stream, pre_buffer=False)
            if file.metadata.num_rows > 10**6:
                raise DataError("decodes to too much")
            schema = pyarrow.schema([(f.name, parquet_process._plain_type(f.type)) for f in file.schema_arrow])
            for batch in file.iter_batches(1024, use_threads=False):
                rows += len(parquet_process._as_plain(batch, schema).to_pylist())
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, TypeError, KeyError) as error:
        raise DataError(str(error)) from error
    return rows


KINDS: dict[str, tuple[Callable[..., bytes], Reader]] = {
    "gguf": (mutate.mutate_gguf, read_gguf_model),
    "safetensors": (mutate.mutate_safetensors, read_model),
    "json": (mutate.mutate_json, read_model),
    "yaml": (mutate.mutate_yaml, read_yaml_file),
    "parquet": (mutate.mutate_footer, read_table),
    "tokenizer": (mutate.mutate_tokenizer, read_tokenizer),
}


def mutated(kind: str, index: int, seed: int, seeds: Path) -> tuple[Path, Path, bytes]:
    """Return the seed folder, the name of the file in it to replace, and its mutated content."""
    rng = random.Random(f"{seed}-{kind}-{index}")
    choices = SEED_KINDS[kind]
    folder, name = choices[rng.randrange(len(choices))]
    other_folder, other_name = choices[rng.randrange(len(choices))]
    content, other = (seeds / folder / name).read_bytes(), (seeds / other_folder / other_name).read_bytes()
    return seeds / folder, Path(name), KINDS[kind][0](content, other, rng)


def place(folder: Path, seed_folder: Path, name: Path, content: bytes) -> None:
    """Fill an empty folder with links to the seed's files, and the mutated one."""
    for file in seed_folder.iterdir():
        if file.name != name.name:
            (folder / file.name).symlink_to(file)
    (folder / name).write_bytes(content)


def read_one(kind: str, index: int, seed: int, seeds: Path) -> dict[str, Any]:
    """Read one file in this process and classify how it ended."""
    with tempfile.TemporaryDirectory(dir=seeds.parent) as temporary:
        folder = Path(temporary)
        place(folder, *mutated(kind, index, seed, seeds))
        before, start = _peak(), time.process_time()
        outcome, message = "read", ""
        try:
            KINDS[kind][1](folder)
        except SmeltError as error:
            long = len(str(error)) > 2000
            outcome, message = ("exception", f"a message of {len(str(error))} characters") if long else ("refused", "")
        except MemoryError:
            outcome, message = "memory", traceback.format_exc(limit=-3)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of a native library is no Exception
            outcome, message = "exception", traceback.format_exc(limit=-4)
        growth = _peak() - before
        if growth > MAX_GROWTH:
            outcome, message = "memory", f"{growth / 2**20:.0f} MiB"
        cpu = time.process_time() - start
        return {"index": index, "outcome": outcome, "cpu": cpu, "growth": growth, "message": message[-1500:]}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(kind: str, indices: range, seed: int, seeds: Path, pipe: int) -> None:
    """Read files and write one line of JSON each; before each file, the line says which one."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, used + HEADROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for index in indices:
        os.write(pipe, f"{index}\n".encode())
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        result = read_one(kind, index, seed, seeds)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(pipe, (json.dumps(result) + "\n").encode())


def run_worker(kind: str, indices: range, seed: int, seeds: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of one forked worker; if it dies, the last one says of what."""
    reader, writer = os.pipe()
    errors = os.dup(2)  # a worker closes its own
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.close(reader)
            work(kind, indices, seed, seeds, writer)
            code = 0
        except Exception:  # readers' exceptions are caught where they are called
            code = OWN_ERROR
            os.write(errors, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(writer)
    os.close(errors)
    current: int | None = None
    with os.fdopen(reader, "rb") as lines:
        while True:
            if not select.select([lines], [], [], WALL_SECONDS)[0]:
                os.kill(process, signal.SIGKILL)
            line = lines.readline()
            if not line:
                break
            if line.startswith(b"{"):
                current = None
                yield json.loads(line)
            else:
                current = int(line)
    _, status = os.waitpid(process, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == OWN_ERROR:
        raise RuntimeError(f"file {current} of kind {kind}: the script itself failed")
    if current is not None:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        hang = number in (signal.SIGPROF, signal.SIGKILL)
        message = f"signal {number}" if number else f"exit code {os.WEXITSTATUS(status)}"
        cpu = float(CPU_SECONDS) if hang else 0.0
        yield {"index": current, "outcome": "hang" if hang else "crash", "cpu": cpu, "growth": 0, "message": message}


def fuzz(kind: str, indices: range, seed: int, seeds: Path, progress: bool = False, state: Path | None = None) -> Tally:
    """Read the mutated files of one kind with these indices; with a `state` folder, go on where it stopped."""
    tally, position = Tally(), indices.start
    saved = state / f"{kind}-{seed}-{indices.start}.json" if state else None
    if saved and saved.exists():
        content = json.loads(saved.read_text())
        position = content.pop("position")
        tally = Tally(**{**content, "counts": Counter(content["counts"])})
    while position < indices.stop:
        for result in run_worker(kind, range(position, min(position + BATCH, indices.stop)), seed, seeds):
            tally.add(result)
            position = result["index"] + 1
            if progress and result["outcome"] in BUGS:
                print(f"{kind} {result['index']}: {result['outcome']}\n{result['message']}", flush=True)
        if saved:
            saved.parent.mkdir(parents=True, exist_ok=True)
            saved.write_text(json.dumps({"position": position, **vars(tally)}))
        if progress:
            print(f"{kind}: {position - indices.start} {dict(tally.counts)} {tally.cpu_seconds:.0f} s", flush=True)
    return tally


def prepare() -> None:
    """Import everything and read once, so that a worker's memory and time are those of its files."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["SMELT_MAX_DECODED_BYTES"] = str(256 * 2**20)


def row_of(kind: str, tally: Tally, files: int) -> dict[str, Any]:
    counts = {outcome: tally.counts[outcome] for outcome in OUTCOMES}
    facts = {"cpu_seconds": round(tally.cpu_seconds, 1), "slowest_seconds": round(tally.slowest, 2)}
    bugs = [{"index": bug["index"], "outcome": bug["outcome"], "message": bug["message"][-300:]} for bug in tally.bugs]
    return {"kind": kind, "files": files, **counts, **facts, "largest_growth": tally.largest, "bugs": bugs[:20]}


def fuzz_row(kind: str, indices: range, seed: int, seeds: Path, state: Path | None) -> dict[str, Any]:
    return row_of(kind, fuzz(kind, indices, seed, seeds, True, state), len(indices))


def page(rows: list[dict[str, Any]], seed: int) -> str:
    from common import table

    lines = [
        [row["kind"], f"{row['files']:,}", *(f"{row[outcome]:,}" for outcome in OUTCOMES),
         f"{row['slowest_seconds']:.2f} s", f"{row['largest_growth'] / 2**20:.0f} MiB", f"{row['cpu_seconds']:.0f} s"]
        for row in rows
    ]  # fmt: skip
    headings = ["files of", "number", "read", "refused", "other exception", "crash", "hang", "too much memory"]
    text = table([*headings, "slowest file", "largest growth", "CPU time"], lines)
    return (
        f"# Mutated files\n\n{sum(row['files'] for row in rows):,} files, seed {seed}. *Refused*: one sentence, a "
        f"`SmeltError`. *Hang*: more than {CPU_SECONDS} s of CPU time. *Too much memory*: a MemoryError below "
        f"{HEADROOM // 2**30} GiB of address space, or more than {MAX_GROWTH // 2**20} MiB of resident memory for one "
        f"file of a few kB.\n\n{text}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=50_000, help="in total, over all kinds")
    parser.add_argument("--kind", choices=[*KINDS], help="only this kind")
    parser.add_argument("--start", type=int, default=0, help="index of the first file")
    parser.add_argument("--index", type=int, help="read only this file, in this process")
    parser.add_argument("--jobs", type=int, default=2, help="kinds that are read at the same time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="folder that keeps the counts, to continue an interrupted run")
    parser.add_argument("--store", action="store_true", help="write benchmarks/results/fuzz_files.{json,md}")
    options = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory() as temporary:
        seeds = Path(temporary) / "seeds"
        write_seeds(seeds)
        if options.index is not None:
            print(yaml.safe_dump(read_one(options.kind, options.index, options.seed, seeds)))
            return
        kinds = [options.kind] if options.kind else [*KINDS]
        tasks = []
        for number, kind in enumerate(kinds):
            files = options.files // len(kinds) + (number < options.files % len(kinds))
            tasks.append((kind, range(options.start, options.start + files), options.seed, seeds, options.state))
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            rows = pool.starmap(fuzz_row, tasks, chunksize=1)
        if options.store:
            from common import write

            write("fuzz_files", rows, page(rows, options.seed))
        sys.exit(1 if any(row[bug] for row in rows for bug in BUGS) else 0)


if __name__ == "__main__":
    main()
