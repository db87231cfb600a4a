"""Run a recipe: check, load, measure, apply each step, measure again, save, reload in a clean process, report.

Everything goes into a work folder next to the result until it is complete. An interrupted run resumes from there and
ends with the same bytes; the result appears in one step.
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
from smelt.compression.recipe.batch import resolve_batch_size
from smelt.compression.recipe.inputs import (
    calibration_batches,
    calibration_data,
    check_data,
    evaluation_data,
    fingerprint,
    needs_data,
    split,
)
from smelt.compression.recipe.plan import plan
from smelt.compression.recipe.recipe import Recipe, parse_bytes
from smelt.compression.recipe.record import Before, after_record, measure_size, run_record
from smelt.data import Batch
from smelt.errors import BudgetError, ConfigError, DataError, RecipeError, SmeltError
from smelt.files import atomic_folder, check_writable
from smelt.measure.eval_result import EvalResult
from smelt.measure.evaluate import Data, measure_quality
from smelt.measure.memory import PeakMemory
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.load import load, skeleton
from smelt.models.model import Model
from smelt.models.verify import verify
from smelt.progress import NullProgress, Progress
from smelt.report.page import write_report
from smelt.version import __version__

Say = Callable[[str], None]


@dataclass(frozen=True)
class CompressionResult:
    """The result of a run: the folder, the model, and the record from which the report is drawn."""

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
) -> CompressionResult:
    """Compress a model by a recipe, and verify that the result reloads.

    What cannot work (an unsupported model, missing data, too little memory or disk) is an error before the model is
    loaded. `samples` are prompts to complete before and after. With `offload` the model stays in host memory and its
    blocks are moved to the device one at a time.
    """
    folder = Path(folder)
    run = _Run(source, recipe, folder, device, offload, progress or NullProgress(), say)
    unfinished = run.find_unfinished(resume)
    run.check()
    model, batches, evaluation = run.inputs()
    sentences = [model.generate(prompt) for prompt in samples or []]
    run.open(unfinished, batches)
    try:
        before = run.before(model, evaluation, sentences)
        steps = run.steps(model, batches)
    except (BudgetError, ConfigError, DataError):
        run.checkpoint.clear()  # resuming would only fail again
        raise
    run.finish(before, evaluation, steps, speed, samples or [])
    return CompressionResult(folder, run.model, run.record)


class _Run:
    def __init__(
        self, source: str, recipe: Recipe, folder: Path, device: str, offload: bool, progress: Progress, say: Say
    ) -> None:
        self.source, self.recipe, self.folder, self.device = source, recipe, folder, device
        self.weights_device = "cpu" if offload else device  # where the weights are
        resident = [step.name for step in recipe.steps if not step.offloads]
        if offload and resident:
            raise RecipeError(f"{resident[0]} needs the whole model on one device; remove --offload.")
        self.progress, self.say = progress, say
        self.work = folder.with_name(folder.name + ".partial")
        self.checkpoint = Checkpoint(self.work)
        self.record: dict[str, Any] = {}
        self.model: Model

    def find_unfinished(self, resume: bool) -> dict[str, Any] | None:
        """Return the identity of the interrupted run to resume, if any; refuse a folder that is in the way."""
        check_writable(self.folder)
        check_writable(self.work / "run.json")
        if os.path.lexists(self.folder):
            raise SmeltError(f"{self.folder} exists already; choose another folder or remove it.")
        unfinished = self.checkpoint.load_facts("run")
        if (
            unfinished is None
            and self.work.exists()
            and any(not file.name.startswith(".") for file in self.work.iterdir())
        ):
            raise SmeltError(f"{self.work} exists and is not an unfinished run; remove it or choose another folder.")
        if unfinished is None and resume:
            raise SmeltError(f"there is nothing to resume at {self.work}; run without --resume to start.")
        if unfinished is not None and not resume:
            raise SmeltError(f"{self.work} holds an unfinished run; add --resume to continue it, or remove it.")
        if unfinished is not None and {**self._identity(), "calibration": unfinished.get("calibration")} != unfinished:
            raise SmeltError(f"{self.work} holds an unfinished run of something else; remove it, or repeat that run.")
        return unfinished

    def check(self) -> None:
        """Check recipe, model configuration, data and resources before any weight is loaded."""
        estimate = plan(self.source, self.recipe, self.folder)
        if self.device == "cpu":
            estimate.check()
        check_data(self.recipe, Model(skeleton(self.source)))

    def open(self, unfinished: dict[str, Any] | None, batches: list[Batch]) -> None:
        """Start the work folder, or continue that of an interrupted run if its data has not changed."""
        calibration = fingerprint(batches)
        if unfinished is None:
            self.checkpoint.save_facts("run", {**self._identity(), "calibration": calibration})
        elif unfinished["calibration"] != calibration:
            raise SmeltError(f"the data has changed since the unfinished run in {self.work}; remove it and start over.")
        for leftover in (*self.work.glob("activations-*"), *self.work.glob(".*.tmp")):
            shutil.rmtree(leftover, ignore_errors=True)

    def _identity(self) -> dict[str, Any]:
        """Return what must be unchanged to resume a run, as JSON returns it."""
        identity = {
            "recipe": self.recipe.to_json(),
            "source": self.source,
            "device": self.device,
            "smelt": __version__,
            "torch": torch.__version__,
        }
        plain: dict[str, Any] = json.loads(json.dumps(identity))
        return plain

    def inputs(self) -> tuple[Model, list[Batch], Data | None]:
        self.say(f"loading {self.source}")
        model = load(self.source, device=self.weights_device)
        if not needs_data(self.recipe):
            return model, [], evaluation_data(self.recipe, None, model) if model.tokenizer else None
        data, held_out = split(self.recipe, calibration_data(self.recipe, model))
        batches: list[Batch] = []
        if any(step.uses_data for step in self.recipe.steps):
            settings = resolve_batch_size(self.recipe, model.anatomy, torch.device(self.device)).data
            batches = calibration_batches(settings, data, model, self.recipe.seed)
        return model, batches, evaluation_data(self.recipe, held_out, model)

    def before(self, model: Model, evaluation: Data | None, sentences: list[str]) -> Before:
        """Measure the model before any change; the result is checkpointed."""
        quality = None
        if evaluation is not None:
            self.say(f"measuring the source model on {evaluation.name}")
            quality = self._checkpointed_quality("before", model, evaluation)
        return Before(measure_size(model, self.recipe), quality, sentences)

    def steps(self, model: Model, batches: list[Batch]) -> list[dict[str, Any]]:
        """Apply the steps, skipping those that an interrupted run finished."""
        records = []
        for position, step in enumerate(self.recipe.steps):
            name = f"step-{position}"
            done = self.checkpoint.load_facts(name)
            if done is not None:
                model = load_artifact(self.work / name, device=self.weights_device)
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
            memory_limit=None if self.recipe.memory_limit is None else parse_bytes(self.recipe.memory_limit),
            folder=self.work,
            device=torch.device(self.device) if self.weights_device != self.device else None,
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
            quality = self._checkpointed_quality("after", self.model, evaluation)
        base = load(self.source, device=self.weights_device) if speed or quality is not None else None
        if speed:
            self.say("timing both models, alternating")
        after = after_record(self.model, base, before, quality, evaluation, self.recipe, speed, prompts)
        self.record = run_record(self.source, self.folder.name, self.recipe, before, after, steps, self.model, prompts)
        self.say("saving, and reloading in a clean process")
        del base
        with atomic_folder(self.folder, inside=self.work) as temporary:
            save_artifact(self.model, temporary, {"recipe": self.recipe.to_json(), **after.reproducible})
            verify(self.model, temporary)
            (temporary / "measurements.json").write_text(json.dumps(self.record, indent=1) + "\n")
            write_report(self.record, temporary / "report.html")
        self.model.source = str(self.folder)
        shutil.rmtree(self.work, ignore_errors=True)

    def _checkpointed_quality(self, name: str, model: Model, data: Data) -> EvalResult:
        """Measure, or return the measurement of the interrupted run."""
        tensors, facts = self.checkpoint.load(f"quality-{name}"), self.checkpoint.load_facts(f"quality-{name}")
        if tensors is not None and facts is not None:
            arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
            return EvalResult(**{**facts, **arrays})
        quality = measure_quality(model, data, **self.recipe.evaluate.options(), progress=self.progress)
        arrays = {key: value for key, value in vars(quality).items() if isinstance(value, np.ndarray)}
        plain = {key: value for key, value in vars(quality).items() if key not in arrays and value is not None}
        self.checkpoint.save(f"quality-{name}", {key: torch.from_numpy(value) for key, value in arrays.items()})
        self.checkpoint.save_facts(f"quality-{name}", plain)
        return quality


def _states(model: Model) -> set[tuple[str, int, int]]:
    """Return each tensor's name, address and version: an entry missing from a later set was changed in between."""
    tensors = itertools.chain(model.network.named_parameters(), model.network.named_buffers())
    return {(name, tensor.data_ptr(), tensor._version) for name, tensor in tensors}
