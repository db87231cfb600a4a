"""Running a recipe: load, measure, apply each step, measure again, save, prove in a clean process, report.

Everything goes into a work folder beside the result until it is complete. A killed run goes on from there and ends
with the same bytes; the result appears in one step.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smelt.compression.base import Method, MethodContext
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.recipe.batch import with_batch
from smelt.compression.recipe.inputs import (
    Data,
    calibration_batches,
    calibration_data,
    evaluation_data,
    fingerprint,
    measure_quality,
    needs_data,
    split,
)
from smelt.compression.recipe.recipe import Recipe, bytes_of
from smelt.compression.recipe.record import Before, after_record, run_record, size_of
from smelt.data import Batch
from smelt.errors import BudgetError, ConfigError, DataError, RecipeError, SmeltError
from smelt.files import atomic_folder, check_writable
from smelt.measure.eval_result import EvalResult
from smelt.measure.memory import PeakMemory
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.load import load
from smelt.models.model import Model
from smelt.models.verify import verify
from smelt.progress import NullProgress, Progress
from smelt.report.page import write_report
from smelt.version import __version__

Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """What a run gave: the folder, the model, and the record that the report is drawn from."""

    folder: Path
    model: Model
    record: dict[str, Any]


def compress(
    source: str,
    recipe: Recipe,
    folder: str | Path,
    *,
    resume: bool = False,
    device: str = "cpu",
    offload: bool = False,
    speed: bool = True,
    samples: list[str] | None = None,
    progress: Progress | None = None,
    say: Say = lambda _: None,
) -> Result:
    """Make the smaller model and prove it. `samples` are prompts to continue before and after. With `offload` the model
    stays in host memory and its blocks come to the device one at a time."""
    folder = Path(folder)
    run = _Run(source, recipe, folder, device, offload, progress or NullProgress(), say)
    found = run.look(resume)
    model, batches, evaluation = run.inputs()
    sentences = [model.generate(prompt) for prompt in samples or []]
    run.open(found, batches)
    try:
        before = run.before(model, evaluation, sentences)
        steps = run.steps(model, batches)
    except (BudgetError, ConfigError, DataError):
        run.checkpoint.clear()  # the same run would only come to the same end
        raise
    run.finish(before, evaluation, steps, speed, samples or [])
    return Result(folder, run.model, run.record)


class _Run:
    def __init__(
        self, source: str, recipe: Recipe, folder: Path, device: str, offload: bool, progress: Progress, say: Say
    ) -> None:
        self.source, self.recipe, self.folder, self.device = source, recipe, folder, device
        self.home = "cpu" if offload else device  # where the model lies
        whole = [step.name for step in recipe.steps if not step.offloads]
        if offload and whole:
            raise RecipeError(f"{whole[0]} needs the whole model in one place; leave --offload out.")
        self.progress, self.say = progress, say
        self.work = folder.with_name(folder.name + ".partial")
        self.checkpoint = Checkpoint(self.work)
        self.record: dict[str, Any] = {}
        self.model: Model

    def look(self, resume: bool) -> dict[str, Any] | None:
        """The mark of a killed run to go on with, if there is one; what stands in the way is refused."""
        check_writable(self.folder)
        check_writable(self.work / "run.json")
        if os.path.lexists(self.folder):
            raise SmeltError(f"{self.folder} exists already; choose another folder or remove it.")
        found = self.checkpoint.load_facts("run")
        if found is None and self.work.exists() and any(not file.name.startswith(".") for file in self.work.iterdir()):
            raise SmeltError(f"{self.work} is in the way and no unfinished run; remove it or choose another folder.")
        if found is not None and not resume:
            raise SmeltError(f"{self.work} holds an unfinished run; add --resume to go on with it, or remove it.")
        if found is not None and {**self._mark(), "calibration": found.get("calibration")} != found:
            raise SmeltError(f"{self.work} holds an unfinished run of something else; remove it, or repeat that run.")
        return found

    def open(self, found: dict[str, Any] | None, batches: list[Batch]) -> None:
        """Begin the work folder, or take up that of a killed run once it is sure that its data has not changed."""
        calibration = fingerprint(batches)
        if found is None:
            self.checkpoint.save_facts("run", {**self._mark(), "calibration": calibration})
        elif found["calibration"] != calibration:
            raise SmeltError(f"the data has changed since the unfinished run in {self.work}; remove it and start anew.")
        for left_behind in (*self.work.glob("activations-*"), *self.work.glob(".*.tmp")):
            shutil.rmtree(left_behind, ignore_errors=True)

    def _mark(self) -> dict[str, Any]:
        """What must be the same for a killed run to go on, as JSON gives it back."""
        mark = {
            "recipe": self.recipe.to_json(),
            "source": self.source,
            "device": self.device,
            "smelt": __version__,
            "torch": torch.__version__,
        }
        plain: dict[str, Any] = json.loads(json.dumps(mark))
        return plain

    def inputs(self) -> tuple[Model, list[Batch], Data | None]:
        self.say(f"loading {self.source}")
        model = load(self.source, device=self.home)
        if not needs_data(self.recipe):
            return model, [], evaluation_data(self.recipe, None, model) if model.tokenizer else None
        data, held_out = split(self.recipe, calibration_data(self.recipe, model))
        batches: list[Batch] = []
        if any(step.uses_data for step in self.recipe.steps):
            settings = with_batch(self.recipe, model.anatomy, torch.device(self.device)).data
            batches = calibration_batches(settings, data, model, self.recipe.seed)
        return model, batches, evaluation_data(self.recipe, held_out, model)

    def before(self, model: Model, evaluation: Data | None, sentences: list[str]) -> Before:
        """What is known of the model before any change: measured once, kept for a resumed run."""
        quality = None
        if evaluation is not None:
            self.say(f"measuring the model as it is on {evaluation.name}")
            quality = self._kept_quality("before", model, evaluation)
        return Before(size_of(model, self.recipe), quality, sentences)

    def steps(self, model: Model, batches: list[Batch]) -> list[dict[str, Any]]:
        """Apply the steps, each from where a killed run left it."""
        records = []
        for position, step in enumerate(self.recipe.steps):
            name = f"step-{position}"
            done = self.checkpoint.load_facts(name)
            if done is not None:
                model = load_artifact(self.work / name, device=self.home)
                model.source = self.source
            else:
                self.say(f"step {position + 1} of {len(self.recipe.steps)}: {step.name}")
                done = self._apply(step, model, batches, name)
            records.append(done)
        self.model = model
        return records

    def _apply(self, step: Method, model: Model, batches: list[Batch], name: str) -> dict[str, Any]:
        context = MethodContext(
            batches=batches,
            seed=self.recipe.seed,
            progress=self.progress,
            checkpoint=self.checkpoint.inside(f"{name}-work"),
            memory_limit=None if self.recipe.memory_limit is None else bytes_of(self.recipe.memory_limit),
            folder=self.work,
            device=torch.device(self.device) if self.home != self.device else None,
        )
        torch.manual_seed(self.recipe.seed)
        untouched = _states(model)
        start = time.perf_counter()
        with PeakMemory() as memory:
            facts = step.apply(model, context)
        model.history.append({**step.to_json(), "seed": self.recipe.seed, "calibration": fingerprint(batches)})
        record = {
            "name": step.name,
            "seconds": time.perf_counter() - start,
            "peak_bytes": max(memory.peak_bytes, memory.device_peak_bytes),
            "changed": {
                "tensors": len(_states(model) - untouched),
                "parameters_removed": facts.pop("parameters_removed", 0),
            },
            "layers": facts.pop("layers", {}),
            "few_tokens": facts.pop("few_tokens", []),
            "facts": facts,
        }
        if not (self.work / name).exists():
            with atomic_folder(self.work / name) as temporary:
                save_artifact(model, temporary)
        self.checkpoint.save_facts(name, record)
        context.checkpoint.clear()
        return record

    def finish(
        self, before: Before, evaluation: Data | None, steps: list[dict[str, Any]], speed: bool, prompts: list[str]
    ) -> None:
        quality = None
        if evaluation is not None:
            self.say(f"measuring the result on {evaluation.name}")
            quality = self._kept_quality("after", self.model, evaluation)
        base = load(self.source, device=self.home) if speed or quality is not None else None
        if speed:
            self.say("timing both, in turns")
        after = after_record(self.model, base, before, quality, evaluation, self.recipe, speed, prompts)
        self.record = run_record(self.source, self.folder.name, self.recipe, before, after, steps, self.model, prompts)
        self.say("saving, and reloading in a clean process")
        del base
        with atomic_folder(self.folder, inside=self.work) as temporary:
            save_artifact(self.model, temporary, {"recipe": self.recipe.to_json(), **after.unvarying})
            verify(self.model, temporary)
            (temporary / "measurements.json").write_text(json.dumps(self.record, indent=1) + "\n")
            write_report(self.record, temporary / "report.html")
        self.model.source = str(self.folder)
        shutil.rmtree(self.work, ignore_errors=True)

    def _kept_quality(self, name: str, model: Model, data: Data) -> EvalResult:
        """CostMetric, or take the measurement of the killed run."""
        kept, facts = self.checkpoint.load(f"quality-{name}"), self.checkpoint.load_facts(f"quality-{name}")
        if kept is not None and facts is not None:
            arrays = {key: tensor.numpy() for key, tensor in kept.items()}
            return EvalResult(**{**facts, **arrays})
        quality = measure_quality(model, data, self.recipe.evaluate, self.progress)
        arrays = {key: value for key, value in vars(quality).items() if isinstance(value, np.ndarray)}
        plain = {key: value for key, value in vars(quality).items() if key not in arrays and value is not None}
        self.checkpoint.save(f"quality-{name}", {key: torch.from_numpy(value) for key, value in arrays.items()})
        self.checkpoint.save_facts(f"quality-{name}", plain)
        return quality


def _states(model: Model) -> set[tuple[str, int, int]]:
    """Each tensor's name, place and number of writes so far: what is not in a later set was changed in between."""
    tensors = itertools.chain(model.network.named_parameters(), model.network.named_buffers())
    return {(name, tensor.data_ptr(), tensor._version) for name, tensor in tensors}
