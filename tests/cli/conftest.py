"""Command-line fixtures: two small trained models with data and recipes, and ways to run `smelt`.

`smelt` runs in this process, which is fast. `forked` runs in a separate process that can be killed or
interrupted at a chosen point; it is forked from a server with all imports done, since those take seconds.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PreTrainedModel

import smelt
import smelt.compression.recipe.plan
import smelt.compression.recipe.run
from smelt.cli.main import main
from smelt.cli.output import console
from smelt.compression.recipe.recipe import Recipe
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.verify import outputs, probe
from tests.character_tokenizer import character_tokenizer
from tests.trained import labeled_rows, sentences, trained_bert, trained_llama

NOT_THE_SAME_EVERY_TIME = ("measurements.json", "report.html", "passport.json")  # they contain times and dates


@dataclass(frozen=True)
class Done:
    """How a call of `smelt` ended."""

    code: int
    out: str
    err: str
    peak_bytes: int = 0  # of a forked run that was not killed

    @property
    def sentences(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("smelt: ")]

    def refused(self, words: str, code: int = 2) -> None:
        """Check that it ended with one sentence containing this, as the last line, without a traceback."""
        assert self.code == code, self
        assert len(self.sentences) == 1 and self.err.splitlines()[-1] == self.sentences[0], self.err
        assert words in self.sentences[0], self.sentences[0]
        assert "Traceback" not in self.err + self.out, self.err


Smelt = Callable[..., Done]


@dataclass(frozen=True)
class Place:
    """A folder with the inputs of the tests."""

    folder: Path

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)

    def recipe(self, name: str, content: Any) -> str:
        (self.folder / name).write_text(yaml.safe_dump(content))
        return self / name


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A language model `llama`, a classifier `bert`, `text.txt`, `rows.jsonl`, and a recipe for each model."""
    shared_place = Place(tmp_path_factory.mktemp("use"))
    text, rows = sentences(2000), labeled_rows(160)
    (shared_place.folder / "text.txt").write_text(text)
    (shared_place.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _save(trained_llama(text), character_tokenizer(), shared_place.folder / "llama")
    _save(trained_bert(rows), character_tokenizer(encoder=True), shared_place.folder / "bert")
    shared_place.recipe("llama.yaml", llama_recipe(shared_place))
    shared_place.recipe("bert.yaml", bert_recipe(shared_place))
    return shared_place


def llama_recipe(place: Place, **step: Any) -> dict[str, Any]:
    return {
        "data": {"source": place / "text.txt", "samples": 24, "seq_len": 32, "batch_size": 2},
        "evaluate": {"context": 64, "limit": 1500},
        "steps": [{"method": "fisher", "budget": {"parameters": 0.8}, **step}],
    }


def bert_recipe(place: Place, **step: Any) -> dict[str, Any]:
    return {
        "data": {"source": place / "rows.jsonl", "samples": 48, "seq_len": 32, "batch_size": 4},
        "steps": [{"method": "fisher", "budget": {"macs": 0.7}, **step}],
    }


@pytest.fixture(scope="session")
def pruned(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compressed language model as `smelt compress` wrote it, without repair so that it is worse."""
    recipe = Recipe.parse(llama_recipe(place, repair="none", budget={"parameters": 0.7}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smelt.compression.recipe.run, "verify", _verify_in_process)
        return smelt.compress(place / "llama", recipe, tmp_path_factory.mktemp("pruned") / "out", speed=False).folder


@pytest.fixture
def smelt_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Smelt]:
    """Call `smelt` in this process with the thread count of a forked one: sums must be equal."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(console, "_width", None)  # else it keeps the width at which it was first imported
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def call(*arguments: str) -> Done:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main(list(arguments))
        return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())

    yield call
    torch.set_num_threads(threads)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the slow parts that other tests cover: the clean process, and timing the machine for the plan."""
    monkeypatch.setattr(smelt.compression.recipe.run, "verify", _verify_in_process)
    monkeypatch.setattr(smelt.compression.recipe.plan, "matrix_speed", lambda *_: 1e10)


def _verify_in_process(model: Model, folder: Path) -> None:
    inputs = probe(model)
    assert torch.equal(outputs(load(folder), inputs), outputs(model, inputs))


@dataclass(frozen=True)
class Moment:
    """When to signal a forked run: at the rename of a file (by name, or the nth), or after some seconds."""

    file: str = ""
    number: int = 0
    before: bool = False  # before the rename, not after
    seconds: float = 0.0
    signal: int = signal.SIGKILL


class Forked:
    """Runs `smelt` in separate processes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._calls = folder, 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [
                *(f"smelt.compression.{name}" for name in ("recipe.run", "recipe.plan", "passport.origin")),
                "smelt.measure.latency",
                "tests.cli.conftest",
                "transformers.models.llama.modeling_llama",
            ]
        )

    def __call__(self, *arguments: str, moment: Moment | None = None) -> Done:
        return self.start(*arguments, moment=moment).wait()

    def start(self, *arguments: str, moment: Moment | None = None, quick: bool = True) -> Running:
        self._calls += 1
        out, err = (self._folder / f"{self._calls}.{name}" for name in ("out", "err"))
        process = self._context.Process(target=_child, args=(arguments, out, err, moment, quick))
        process.start()
        return Running(process, out, err)


@dataclass(frozen=True)
class Running:
    """A running forked process."""

    process: Any
    out: Path
    err: Path

    def stop_when_it_says(self, words: str) -> None:
        """Simulate Ctrl-C in a terminal: signal the process and its children."""
        while not (self.err.exists() and words in self.err.read_text()):
            assert self.process.is_alive(), self.err.read_text()
            time.sleep(0.01)
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self) -> Done:
        self.process.join()
        peak = self.out.with_suffix(".peak")
        peak_bytes = int(peak.read_text()) if peak.exists() else 0
        return Done(self.process.exitcode, self.out.read_text(), self.err.read_text(), peak_bytes)


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Forked:
    return Forked(tmp_path_factory.mktemp("forked"))


def _child(arguments: tuple[str, ...], out: Path, err: Path, moment: Moment | None, quick: bool) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs start without it
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(1)
    smelt.compression.recipe.plan.matrix_speed = lambda *_: 1e10
    if quick:
        smelt.compression.recipe.run.verify = _verify_in_process
    if moment is not None:
        _arrange(moment)
    try:
        main(list(arguments))
    finally:
        unit = 1 if sys.platform == "darwin" else 1024
        out.with_suffix(".peak").write_text(str(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def _arrange(moment: Moment) -> None:
    """Arm the signal."""
    if moment.seconds:
        timer = threading.Timer(moment.seconds, os.kill, (os.getpid(), moment.signal))
        timer.daemon = True
        timer.start()
        return
    replace, count = os.replace, iter(range(1, 10_000))

    def replace_and_stop(*paths: Any) -> None:
        hit = moment.file == Path(paths[1]).name or moment.number == next(count)
        if hit and moment.before:
            os.kill(os.getpid(), moment.signal)
        replace(*paths)
        if hit and not moment.before:
            os.kill(os.getpid(), moment.signal)

    os.replace = replace_and_stop


def resume(out: Path | str) -> list[str]:
    """Return `--resume` if there is an unfinished run."""
    partial = Path(f"{out}.partial")
    return ["--resume"] if (partial / "run.json").exists() else []


def same_bytes(first: Path, second: Path) -> bool:
    """Return whether two artifacts have the same files and bytes, except files with times; print what differs."""
    one, other = _contents(first), _contents(second)
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            texts = [contents.get(name, b"").decode(errors="replace").splitlines() for contents in (one, other)]
            print(
                f"{name} differs:", *([] if name.endswith(".safetensors") else unified_diff(*texts, lineterm="", n=0))
            )
    return one == other


def _contents(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name not in NOT_THE_SAME_EVERY_TIME]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def _save(network: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
