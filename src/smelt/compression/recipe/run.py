"""Run a recipe: check, load, measure, apply each step, measure again, save, reload in a clean process, report.

Everything goes into a work folder next to the result until it is complete. An interrupted run resumes from there and
ends with the same bytes; the result appears in one step.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from smelt.compression.base import MethodContext
from smelt.compression.passport.issue import PassportBuilder
from smelt.compression.passport.origin import describe_data
from smelt.compression.recipe.batch import resolve_batch_size
from smelt.compression.recipe.inputs import (
    calibration_batches,
    calibration_data,
    check_data,
    evaluation_data,
    fingerprint,
    needs_data,
    overlap_warning,
    split,
)
from smelt.compression.recipe.plan import CompressionPlan, plan
from smelt.compression.recipe.quality_gate import check_gate, refuse, run_gate, step_costs
from smelt.compression.recipe.ranks import Ranks
from smelt.compression.recipe.recipe import Recipe
from smelt.compression.recipe.record import (
    DEFAULT_PROMPT,
    Before,
    after_record,
    engine_timings,
    measure_size,
    run_record,
)
from smelt.compression.recipe.step_run import StepRunner
from smelt.compression.recipe.work_folder import WorkFolder
from smelt.data import Batch
from smelt.errors import (
    BudgetError,
    ConfigError,
    DataError,
    DivergenceError,
    ModelError,
    RecipeError,
    SmeltError,
)
from smelt.files import atomic_folder, json_text
from smelt.fingerprint import hash_files
from smelt.measure.eval_result import EvalResult
from smelt.measure.evaluate import Data, measure_quality
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.finite import find_non_finite
from smelt.models.image_processor import ImageProcessor
from smelt.models.load import load, resolve, skeleton, source_files
from smelt.models.model import Model
from smelt.models.verify import verify
from smelt.progress import NullProgress, RunProgress, progress_bars
from smelt.report.page import write_report
from smelt.serve.engine.throughput import RequestWorkload, explain_slowdown, measure_throughput, parse_workload
from smelt.version import __version__

Say = Callable[[str], None]
logger = logging.getLogger(__name__)

# Phases of a run, in order, around its steps.
LOADING, BEFORE, AFTER = "loading", "measuring the source model", "measuring the result"
SAVING, TIMING = "saving and verifying", "timing both models"
STARTUP_SECONDS = 5.0  # of loading a model, or a clean process
DISK_BYTES_PER_SECOND = 200e6


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
    workload: str = "chat",
    speed_seconds: float = 60.0,
    samples: list[str] | None = None,
    sign_key: Path | None = None,
    choices: Mapping[str, Any] | None = None,
    progress: RunProgress | None = None,
    say: Say = logger.info,
) -> CompressionResult:
    """Compress a model by a recipe, and verify that the result reloads.

    What cannot work (an unsupported model, missing data, too little memory or disk) is an error before the model is
    loaded. With `speed`, language models are timed in the engine that serves them, for a workload (`chat`, `long`,
    `batch` or the path of a trace), for about `speed_seconds` each, other models by their forward. `guard: speed` in
    the recipe is for the same workload. `samples` are prompts to complete before and after; None is one short prompt.
    With `offload` the model stays in host memory and its blocks are moved to the device one at a time. `sign_key` is a
    private key (PEM) to sign the result with. `choices` are those of the passport of an earlier run, to repeat them
    instead of searching. Progress is shown on standard error unless another reporter is given; `NullProgress()` shows
    nothing.
    """
    if progress is None:
        with progress_bars() as shown:
            return compress(
                source, recipe, folder, resume=resume, device=device, offload=offload, speed=speed, workload=workload,
                speed_seconds=speed_seconds, samples=samples, sign_key=sign_key, choices=choices, progress=shown,
                say=say,
            )  # fmt: skip
    folder = Path(folder)
    recipe = recipe.for_device(device)
    requests = parse_workload(workload)
    timing = (requests, speed_seconds) if speed else None
    work = WorkFolder(folder, source, say)
    run = _Run(source, recipe, work, device, offload, requests, progress, say)
    run.passport = PassportBuilder(source, recipe.to_json(), device, offload, sign_key, choices or {})
    with run.ranks.leading(), work.locked():
        unfinished = work.find_unfinished(run.identity, resume)
        run.check(timing)
        weights = run.weights()
        work.check_weights(unfinished, weights)
        model, batches, evaluation = run.inputs()
        check_gate(recipe, evaluation)
        prompts = [DEFAULT_PROMPT] if samples is None and _completes_text(model) else samples or []
        sentences = [model.generate(prompt) for prompt in prompts]
        finished = work.open(unfinished, {**run.identity, **run.fingerprints(weights, batches, evaluation)})
        try:
            before = run.before(model, evaluation, sentences)
            steps = run.steps(model, batches, finished)
            run.ranks.end()
        except DivergenceError:  # the weights before it are kept
            raise
        except (BudgetError, ConfigError, DataError):
            run.stop_early()
            raise
        run.finish(before, evaluation, steps, timing, prompts)
    return CompressionResult(folder, run.model, run.record)


def take_part(source: str, recipe: Recipe, folder: str | Path, *, device: str) -> None:
    """Take part in the steps that train of a run that rank 0 leads by `compress` with the same arguments."""
    recipe = recipe.for_device(device)
    work = WorkFolder(Path(folder), source, logger.debug)
    run = _Run(source, recipe, work, device, False, parse_workload("chat"), NullProgress(), logger.debug)
    run.passport = PassportBuilder(source, recipe.to_json(), device, False, None, {})
    model, batches, _ = run.inputs()
    while (position := run.ranks.next_step()) is not None:
        if position:
            model = run.load_step(position - 1)
        torch.manual_seed(recipe.seed)
        checkpoint = run.checkpoint.inside(f"step-{position}-work")
        context = MethodContext(batches=batches, seed=recipe.seed, checkpoint=checkpoint, folder=work.path)
        recipe.steps[position].apply(model, context)


class _Run:
    def __init__(
        self, source: str, recipe: Recipe, work: WorkFolder, device: str, offload: bool, workload: RequestWorkload,
        progress: RunProgress, say: Say,
    ) -> None:  # fmt: skip
        self.workload = workload
        self.source, self.recipe, self.folder, self.device = source, recipe, work.out, device
        self.weights_device = "cpu" if offload else device  # where the weights are
        resident = [step.name for step in recipe.steps if not step.offloads]
        if offload and resident:
            raise RecipeError(f"{resident[0]} needs the whole model on one device; remove --offload.")
        self.progress, self.say = progress, say
        self.work, self.checkpoint = work, work.checkpoint
        self.record: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.planned: dict[str, float] = {}  # seconds of each phase
        self.ranks = Ranks()
        self.model: Model
        self.passport: PassportBuilder

    @property
    def identity(self) -> dict[str, Any]:
        """Return what must be unchanged to resume a run, besides its inputs, as JSON returns it."""
        recipe = self.recipe.to_json()
        recipe["evaluate"].pop("max_drop")  # another margin judges the same work
        identity = {
            "recipe": recipe,
            "source": self.source,
            "device": self.device,
            "smelt": __version__,
            "torch": torch.__version__,
        }
        if self.recipe.guard is not None or self.times_layers:  # what is decided depends on the workload
            identity["workload"] = self.workload.fingerprint
        plain: dict[str, Any] = json.loads(json.dumps(identity))
        return plain

    @property
    def times_layers(self) -> bool:
        return any(step.times_layers for step in self.recipe.steps)

    def check(self, timing: tuple[RequestWorkload, float] | None) -> None:
        """Check recipe, model configuration, data and resources before any weight is loaded; schedule the phases."""
        estimate = plan(self.source, self.recipe, self.folder, device=self.device)
        self.planned = _phases(estimate, timing)
        self.progress.schedule(self.planned)
        if self.device == "cpu":
            estimate.check()
        model = Model(
            skeleton(self.source),
            source=self.source,
            image_processor=ImageProcessor.from_folder(resolve(self.source, config_only=True)),
        )
        if self.recipe.guard is not None and model.task != "language":
            raise RecipeError(
                f"`guard: speed` times layers for text generation, and {self.source} is no language model; remove it."
            )
        if self.times_layers and model.task != "language":
            raise RecipeError(
                f"`alignment: measured` times layers for text generation, and {self.source} is no language model; give "
                "a number."
            )
        check_gate(self.recipe, check_data(self.recipe, model))

    def weights(self) -> dict[str, str]:
        """Return the hash of each file of the source model."""
        hashes = hash_files(source_files(self.source), cache=True, progress=self.progress)
        self.passport.source_hashes = hashes
        return hashes

    def fingerprints(self, weights: dict[str, str], batches: list[Batch], evaluation: Data | None) -> dict[str, Any]:
        """Return the fingerprints of all inputs, for the manifest of the run."""
        return {"weights": weights, "calibration": fingerprint(batches), "evaluation": describe_data(evaluation)}

    def stop_early(self) -> None:
        """Keep what a corrected recipe can use; without a finished step, resuming would only fail again."""
        if not self.work.has_finished_steps():
            self.work.remove()
            return
        self.say(f"finished steps are kept in {self.work.path}; correct the later ones and add --resume")

    def inputs(self) -> tuple[Model, list[Batch], Data | None]:
        self.progress.enter(LOADING)
        self.say(f"loading {self.source}")
        model = load(self.source, device=self.weights_device)
        broken = find_non_finite(model.network.state_dict().items())
        if broken is not None:
            raise ModelError(
                f"{broken} of {self.source} contains NaN or infinity; a model must be sound to be compressed."
            )
        if not needs_data(self.recipe):
            readable = model.tokenizer or model.image_processor or model.task == "policy"
            evaluation = evaluation_data(self.recipe, None, model) if readable else None
            self.passport.add_data(None, evaluation)
            return model, [], evaluation
        data, held_out = split(self.recipe, calibration_data(self.recipe, model))
        batches: list[Batch] = []
        if any(step.uses_data for step in self.recipe.steps):
            recorded = self.passport.recorded_batch_size(self.recipe)
            settings = resolve_batch_size(recorded, model.anatomy, torch.device(self.device)).data
            self.passport.batch_size = settings.batch_size
            batches = calibration_batches(settings, data, model, self.recipe.seed)
            self._correct_schedule(batches, settings.samples * settings.seq_len)
        evaluation = evaluation_data(self.recipe, held_out, model)
        warning = overlap_warning(data, evaluation) if batches else None
        if warning is not None:
            self.say(f"warning: {warning}")
            self.warnings.append(warning)
        self.passport.add_data(data, evaluation)
        return model, batches, evaluation

    def _correct_schedule(self, batches: list[Batch], planned_tokens: int) -> None:
        """Scale the planned time of the steps by the tokens that the samples really have: rows may be short."""
        tokens = sum(batch["input_ids"].numel() for batch in batches if "input_ids" in batch)
        if tokens and self.planned:
            names = [
                _step_phase(index, step.name, len(self.recipe.steps)) for index, step in enumerate(self.recipe.steps)
            ]
            corrected = {name: self.planned[name] * tokens / planned_tokens for name in names}
            self.progress.schedule({**self.planned, **corrected})

    def before(self, model: Model, evaluation: Data | None, sentences: list[str]) -> Before:
        """Measure the model before any change; the result is checkpointed."""
        quality = None
        if evaluation is not None:
            self.progress.enter(BEFORE)
            self.say(f"measuring the source model on {evaluation.name}")
            quality = self._checkpointed_quality("before", model, evaluation)
        return Before(measure_size(model, self.recipe), quality, sentences)

    def steps(self, model: Model, batches: list[Batch], finished: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Apply the steps after those that an interrupted run finished."""
        records = list(finished)
        if records:
            model = self.load_step(len(records) - 1)
        runner = StepRunner(
            self.recipe, self.work, self.passport, self.device, self.weights_device, self.workload, self.progress,
            self.say,
        )  # fmt: skip
        for position, step in list(enumerate(self.recipe.steps))[len(records) :]:
            phase = _step_phase(position, step.name, len(self.recipe.steps))
            self.progress.enter(phase)
            self.say(phase)
            with self.ranks.sharing(position) if step.trains else nullcontext():
                records.append(runner.run(position, step, model, batches))
        self.model = model
        return records

    def load_step(self, position: int) -> Model:
        """Load the result of a finished step."""
        model = load_artifact(self.work.path / f"step-{position}", device=self.weights_device)
        model.source = self.source
        return model

    def finish(
        self,
        before: Before,
        evaluation: Data | None,
        steps: list[dict[str, Any]],
        timing: tuple[RequestWorkload, float] | None,
        prompts: list[str],
    ) -> None:
        quality = None
        if evaluation is not None:
            self.progress.enter(AFTER)
            self.say(f"measuring the result on {evaluation.name}")
            quality = self._checkpointed_quality("after", self.model, evaluation)
        self.work.check_weights(self.work.manifest, self.weights())  # what is compared is what was compressed
        verdict = run_gate(self.recipe, quality, before.quality)
        refused = verdict is not None and not verdict.passed
        if refused and quality is not None and before.quality is not None:
            self.say("the quality gate failed; measuring the result of each step")
            timing = None
            steps = step_costs(
                self.work.path, steps, before.quality, quality, partial(self._measure, evaluation), self.weights_device
            )
        served = self.model.task == "language"
        base = load(self.source, device=self.weights_device) if timing or quality is not None else None
        if timing and not served:
            self.say("timing both models, alternating")
        after = after_record(
            self.model, base, before, quality, evaluation, self.recipe, timing is not None and not served, prompts
        )
        self.record = run_record(self.source, self.folder.name, self.recipe, before, after, steps, self.model, prompts)
        if self.warnings:
            self.record["warnings"] = self.warnings
        if verdict is not None:
            self.record["quality"]["gate"] = verdict.to_json()
            if refused:
                raise refuse(verdict, self.record, self.work.path)
        self.progress.enter(SAVING)
        self.say("saving, and reloading in a clean process")
        del base
        with atomic_folder(self.folder, inside=self.work.path) as temporary:
            save_artifact(self.model, temporary, {"recipe": self.recipe.to_json(), **after.reproducible})
            verify(self.model, temporary)
            if timing and served:
                self._time_engines(temporary, *timing)
            self.record["passport"] = self.passport.prepare(temporary, self.model, steps, after.reproducible)
            (temporary / "measurements.json").write_text(json_text(self.record))
            write_report(self.record, temporary / "report.html")
            self.passport.write(temporary, self.folder.name)
        self.model.source = str(self.folder)
        self.work.remove()

    def _time_engines(self, folder: Path, workload: RequestWorkload, seconds: float) -> None:
        """Time the saved model and its source as they are served."""
        self.progress.enter(TIMING)
        self.say(f"timing both models in the engine, up to {seconds:g} s each")
        try:
            new = measure_throughput(str(folder), workload, device=self.device, seconds=seconds)
            gc.collect()  # an engine and its captured graphs refer to each other
            sizes = tuple(row.streams for row in new.rows)
            base = measure_throughput(
                self.source, workload, device=self.device, seconds=seconds, streams=sizes, packed=False
            )
            gc.collect()
        except (SmeltError, torch.OutOfMemoryError) as error:
            self.say(f"the models could not be timed in the engine: {error}")
            return
        slowdown = explain_slowdown(new, base, guarded=self.recipe.guard is not None)
        self.record["speed"] = engine_timings(new, base)
        self.record["engine"] = {"before": base.to_json(), "after": new.to_json(), "slowdown": slowdown}
        if slowdown is not None:
            self.say(slowdown)

    def _measure(self, data: Data | None, model: Model) -> EvalResult:
        assert data is not None
        return measure_quality(model, data, **self.recipe.evaluate.options(), progress=self.progress)

    def _checkpointed_quality(self, name: str, model: Model, data: Data) -> EvalResult:
        """Measure, or return the measurement of the interrupted run."""
        tensors, facts = self.checkpoint.load(f"quality-{name}"), self.checkpoint.load_facts(f"quality-{name}")
        if tensors is not None and facts is not None:
            arrays = {key: tensor.numpy() for key, tensor in tensors.items()}
            return EvalResult(**{**facts, **arrays})
        quality = self._measure(data, model)
        quality.check_finite("the source model" if name == "before" else "the result")
        arrays = {key: value for key, value in vars(quality).items() if isinstance(value, np.ndarray)}
        plain = {key: value for key, value in vars(quality).items() if key not in arrays and value is not None}
        self.checkpoint.save(f"quality-{name}", {key: torch.from_numpy(value) for key, value in arrays.items()})
        self.checkpoint.save_facts(f"quality-{name}", plain)
        return quality


def _completes_text(model: Model) -> bool:
    return model.task == "language" and model.tokenizer is not None


def _phases(estimate: CompressionPlan, timing: tuple[RequestWorkload, float] | None) -> dict[str, float]:
    """Return the phases of a run with their planned seconds."""
    disk = STARTUP_SECONDS + estimate.bytes / DISK_BYTES_PER_SECOND
    evaluation = max(0.0, estimate.seconds - sum(step.seconds for step in estimate.steps))
    steps = {
        _step_phase(position, step.method, len(estimate.steps)): step.seconds
        for position, step in enumerate(estimate.steps)
    }
    speed = {} if timing is None else {TIMING: 2 * timing[1]}
    # The result is compared by perplexity and by divergence, which runs both models.
    return {LOADING: disk, BEFORE: evaluation / 4, **steps, AFTER: 3 * evaluation / 4, SAVING: 2 * disk, **speed}


def _step_phase(position: int, method: str, steps: int) -> str:
    return f"step {position + 1} of {steps}: {method}"
