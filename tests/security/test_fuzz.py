"""A few hundred mutated files of every kind: read or refused with one sentence, nothing else.

`benchmarks/fuzz_files.py` does the same with 50,000 files.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
_FILES = 40  # of each kind
_SEED = 1


@pytest.fixture(scope="module")
def fuzz_files() -> Iterator[ModuleType]:
    threads, environment = torch.get_num_threads(), dict(os.environ)
    spec = importlib.util.spec_from_file_location("fuzz_files", _BENCHMARKS / "fuzz_files.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.prepare()
    yield module
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.remove(str(_BENCHMARKS))


@pytest.fixture(scope="module")
def seeds(fuzz_files: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "seeds"
    fuzz_files.write_seeds(folder)
    return folder


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "json", "yaml", "parquet", "tokenizer"])
def test_mutated_files_are_read_or_refused(fuzz_files: ModuleType, seeds: Path, kind: str) -> None:
    """In this process: a crash or a hang of one of these files would be one of the test run."""
    results = [fuzz_files.read_one(kind, index, _SEED, seeds) for index in range(_FILES)]
    assert [result for result in results if result["outcome"] not in ("read", "refused")] == []
    assert {result["outcome"] for result in results} == {"read", "refused"}  # the seeds are valid, and mutations bite


def test_the_seeds_are_valid(fuzz_files: ModuleType, seeds: Path) -> None:
    for kind, places in fuzz_files.SEED_KINDS.items():
        for folder, _ in places:
            fuzz_files.KINDS[kind][1](seeds / folder)


def test_crashes_hangs_and_exceptions_are_counted(
    fuzz_files: ModuleType, seeds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters themselves: readers that kill their process, run forever, wait, fail, or take memory."""

    def misbehave(folder: Path) -> None:
        number = next(numbers)
        if number == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        while number == 2:
            pass
        if number == 3:
            raise KeyError("a bug")
        if number == 4:
            bytearray(4 * fuzz_files.HEADROOM)

    monkeypatch.setattr(fuzz_files, "CPU_SECONDS", 0.5)
    mutate = fuzz_files.KINDS["yaml"][0]
    monkeypatch.setitem(fuzz_files.KINDS, "yaml", (mutate, misbehave))
    outcomes = []
    for expected in range(5):  # each in a worker of its own, which starts to count at `expected`
        numbers = iter(range(expected, 9))
        outcomes += [result["outcome"] for result in fuzz_files.run_worker("yaml", range(1), _SEED, seeds)]
    assert outcomes == ["read", "crash", "hang", "exception", "memory"]


def test_every_file_depends_on_its_index_alone(fuzz_files: ModuleType, seeds: Path) -> None:
    for kind in fuzz_files.KINDS:
        first, again = ([fuzz_files.mutated(kind, index, _SEED, seeds)[2] for index in range(300)] for _ in range(2))
        assert first == again
        assert len(set(first)) > 200


def test_a_failure_of_the_script_is_not_counted_as_one_of_a_reader(
    fuzz_files: ModuleType, seeds: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(content: bytes, other: bytes, rng: object) -> bytes:
        raise RecursionError

    monkeypatch.setitem(fuzz_files.KINDS, "yaml", (fail, fuzz_files.KINDS["yaml"][1]))
    with pytest.raises(RuntimeError, match="the script itself failed"):
        list(fuzz_files.run_worker("yaml", range(1), _SEED, seeds))
    assert "RecursionError" in capfd.readouterr().err
