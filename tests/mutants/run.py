"""Mutation testing: make each small change of `mutations.yaml` in a copy of the source and run its closest tests.

    python -m tests.mutants.run [--list tests/mutants/kernels.yaml] [--file measure/paired.py] [--jobs 2]
                                [--json FILE [--resume]]

A mutation is killed if a test fails or uses far more CPU time than before. One that survives is a gap in the tests,
unless its entry says why no test can notice it. One that keeps test files from being imported, or a kernel from being
compiled so that all tests are skipped, proves nothing and is an error in the list. Every child is forked from a process
that has imported torch and transformers but not Smelt, which saves most of the time that a new interpreter would take.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.yaml")
MAX_SURVIVORS = 0.05
_CPU_FACTOR, _CPU_SECONDS = 5, 30  # a child may use so many times the CPU time of the unchanged code, and at least this
_TIMEOUT = "more CPU time than allowed"

# A machine for GPU tests may lack the plugin, whose option stands in `addopts`.
_TIMEOUT_PLUGIN = ("-p", "pytest_timeout") if importlib.util.find_spec("pytest_timeout") else ("-o", "addopts=")
_LIBRARIES = ["scipy.optimize", "scipy.stats", "safetensors.torch", "torch", "torch._dynamo", "openai"]
_LIBRARIES += ["transformers.generation", "transformers.modeling_utils", "transformers.models.llama.modeling_llama"]

Result = Literal["killed", "survived", "not importable"]


@dataclass(frozen=True)
class Mutation:
    """Replace the line `old`, which occurs once in the file, by `new`; both without their indentation."""

    file: str  # below src/smelt
    old: str
    new: str
    tests: str  # arguments of pytest
    reason: str = ""  # why no test can notice it

    def apply(self, source: str) -> str:
        """Return the changed source of the file."""
        lines = source.split("\n")
        matches = [number for number, line in enumerate(lines) if line.strip() == self.old]
        if len(matches) != 1:
            raise ValueError(f"{self.file}: {len(matches)} lines are {self.old!r}; update the list of mutations.")
        line = lines[matches[0]]
        lines[matches[0]] = line[: len(line) - len(line.lstrip())] + self.new
        return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    mutation: Mutation
    result: Result
    by: str = ""  # the test that failed


def read_mutations(path: Path = LIST) -> list[Mutation]:
    """Read the list of mutations."""
    files = yaml.safe_load(path.read_text())
    return [Mutation(file["file"], *line[:2], file["tests"], *line[2:]) for file in files for line in file["lines"]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests against every mutation of mutations.yaml.")
    parser.add_argument("--list", type=Path, default=LIST, help="of mutations; kernels.yaml has those of kernels")
    parser.add_argument("--file", action="append", help="only mutations of this file (repeatable)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write all outcomes here, and a table beside it as .md")
    parser.add_argument(
        "--resume", action="store_true", help="run only what the file of --json does not have as killed"
    )
    options = parser.parse_args()
    listed = read_mutations(options.list)
    mutations = [mutation for mutation in listed if not options.file or mutation.file in options.file]
    outcomes = (
        [outcome for outcome in _read_killed(options.json) if outcome.mutation in mutations] if options.resume else []
    )
    done = [outcome.mutation for outcome in outcomes]
    _import_libraries()
    with tempfile.TemporaryDirectory() as folder:
        for outcome in run_all(
            [mutation for mutation in mutations if mutation not in done], Path(folder), options.jobs
        ):
            outcomes.append(outcome)
            if options.json:
                ordered = sorted(outcomes, key=lambda outcome: mutations.index(outcome.mutation))
                _write(options.json, ordered, len(listed))
    print(summarize(outcomes, len(listed)))
    others = [outcome for outcome in outcomes if outcome.result != "killed"]
    explained = all(outcome.result == "survived" and outcome.mutation.reason for outcome in others)
    return int(not explained or len(others) > MAX_SURVIVORS * len(outcomes))


def _read_killed(path: Path) -> list[Outcome]:
    rows = json.loads(path.read_text()) if path.exists() else []
    return [Outcome(Mutation(**row["mutation"]), row["result"], row["by"]) for row in rows if row["result"] == "killed"]


def _write(path: Path, outcomes: list[Outcome], listed: int) -> None:
    path.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(summarize(outcomes, listed))


def summarize(outcomes: list[Outcome], listed: int) -> str:
    """Return a Markdown table with one row per file, and the mutations that were not killed, of all that are listed."""
    lines = ["# Mutation testing", "", "| file | mutations | killed | survived |", "| --- | ---: | ---: | ---: |"]
    for name in [*dict.fromkeys(outcome.mutation.file for outcome in outcomes), "all files"]:
        results = [outcome.result for outcome in outcomes if name in ("all files", outcome.mutation.file)]
        lines.append(f"| {name} | {len(results)} | {results.count('killed')} | {results.count('survived')} |")
    pending = listed - len(outcomes)
    if pending > 0:
        lines += ["", f"{pending} mutations of the list have no result yet (`--resume` runs them) and are not counted."]
    for outcome in outcomes:
        if outcome.result != "killed":
            mutation = outcome.mutation
            lines += ["", f"{mutation.file}, {outcome.result}: {mutation.reason or 'no reason given'}", "", "```diff"]
            lines += [f"- {mutation.old}", f"+ {mutation.new}", "```"]
    return "\n".join([*lines, ""])


def run_all(mutations: list[Mutation], folder: Path, jobs: int) -> Iterator[Outcome]:
    """Run every mutation, `jobs` at a time, each in its own copy of the source, and before them the unchanged code."""
    trees = [_copy_source(folder / str(number)) for number in range(jobs)]
    limits: dict[str, float] = {}
    waiting, running = list(mutations), dict[int, tuple[Mutation, Path]]()
    while waiting or running:
        while waiting and trees:
            mutation, tree = waiting.pop(0), trees.pop()
            if mutation.tests not in limits:
                limits[mutation.tests] = max(_CPU_SECONDS, _CPU_FACTOR * _run_unchanged(tree, mutation.tests))
            file = tree / "smelt" / mutation.file
            file.write_text(mutation.apply(file.read_text()))
            running[_fork(tree, mutation.tests, limits[mutation.tests])] = mutation, tree
        process, status = os.wait()
        mutation, tree = running.pop(process)
        result, by = _result(status, tree)
        shutil.copy(ROOT / "src" / "smelt" / mutation.file, tree / "smelt" / mutation.file)
        trees.append(tree)
        print(f"{result:9} {mutation.file}: {mutation.new}  ({by})", flush=True)
        yield Outcome(mutation, result, by)


def _result(status: int, tree: Path) -> tuple[Result, str]:
    """Return the result of a child that ended with this status, and the test that failed."""
    if os.WIFSIGNALED(status):
        return "killed", _TIMEOUT if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL) else "crash"
    failures = (tree / "failures").read_text().splitlines()
    if os.WEXITSTATUS(status) == pytest.ExitCode.OK and (tree / "passes").exists():
        return "survived", ""
    if os.WEXITSTATUS(status) == pytest.ExitCode.TESTS_FAILED and failures:
        return "killed", failures[0]
    return "not importable", ""


def _copy_source(tree: Path) -> Path:
    shutil.copytree(ROOT / "src" / "smelt", tree / "smelt", ignore=shutil.ignore_patterns("__pycache__"))
    return tree


def _run_unchanged(tree: Path, tests: str) -> float:
    """Return the CPU seconds of the tests, which must pass."""
    _, status, usage = os.wait4(_fork(tree, tests, 3600), 0)
    if status:
        raise SystemExit(f"{(tree / 'log').read_text()}\nThe tests fail without any mutation: {tests}")
    print(f"unchanged {usage.ru_utime + usage.ru_stime:.1f} s  {tests}", flush=True)
    return usage.ru_utime + usage.ru_stime


def _import_libraries() -> None:
    """Import what tests use most, once for all children."""
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing all plugins takes longer than most tests
    for name in _LIBRARIES:
        if importlib.util.find_spec(name.partition(".")[0]):
            importlib.import_module(name)
    if importlib.util.find_spec("hypothesis"):
        _load_hypothesis_profile()
    sys.modules["torch"].set_num_threads(1)
    assert "smelt" not in sys.modules


def _load_hypothesis_profile() -> None:
    """Use the same examples in every run, and do not search for smaller ones."""
    hypothesis = importlib.import_module("hypothesis")
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, phases=[hypothesis.Phase.generate])
    hypothesis.settings.load_profile("mutants")


class _Results:
    """A pytest plugin that writes which tests failed, and whether any passed, to files in a folder; tests that cannot
    be collected are none."""

    def __init__(self, folder: Path) -> None:
        self.failures, self.passes = folder / "failures", folder / "passes"
        self.failures.write_text("")
        self.passes.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            with self.failures.open("a") as file:
                file.write(report.nodeid + "\n")
        elif report.passed and report.when == "call":
            self.passes.touch()


def _fork(tree: Path, tests: str, cpu_seconds: float) -> int:
    """Run tests against the source of `tree` in a forked process; return its id."""
    process = os.fork()
    if process:
        return process
    try:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(usage.ru_utime + usage.ru_stime + cpu_seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        with (tree / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.chdir(ROOT)
        sys.dont_write_bytecode = True
        os.environ.update(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(tree))
        sys.path.insert(0, str(tree))
        arguments = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *_TIMEOUT_PLUGIN, *shlex.split(tests)]
        os._exit(int(pytest.main(arguments, plugins=[_Results(tree)])))
    finally:
        os._exit(70)


if __name__ == "__main__":
    sys.exit(main())
