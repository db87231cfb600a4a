"""Run one step of a recipe: what its method gets, what it changed, and the record and the model that are kept of it."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smelt.compression.base import Method, MethodContext, SpeedGuard, WidthTimer
from smelt.compression.passport.issue import PassportBuilder
from smelt.compression.recipe.inputs import fingerprint
from smelt.compression.recipe.recipe import Recipe, parse_bytes
from smelt.compression.recipe.work_folder import WorkFolder
from smelt.data import Batch
from smelt.errors import ModelError
from smelt.files import atomic_folder, json_text
from smelt.fingerprint import hash_folder
from smelt.measure.memory import PeakMemory
from smelt.models.artifact import save_artifact
from smelt.models.finite import find_non_finite
from smelt.models.model import Model
from smelt.models.token_pruning import all_tokens
from smelt.progress import RunProgress
from smelt.serve.engine.layer_timing import LayerTimer
from smelt.serve.engine.throughput import RequestWorkload


@dataclass(frozen=True)
class StepRunner:
    """Applies the steps of a run, one at a time."""

    recipe: Recipe
    work: WorkFolder
    passport: PassportBuilder
    device: str
    weights_device: str  # where the weights are; blocks are moved to `device` if that is another
    workload: RequestWorkload  # for which layers are timed
    progress: RunProgress
    say: Callable[[str], None]

    def run(self, position: int, step: Method, model: Model, batches: list[Batch]) -> dict[str, Any]:
        """Apply a step to the model, save the result in the work folder, and return the record of the step."""
        name = f"step-{position}"
        context = MethodContext(
            batches=batches,
            seed=self.recipe.seed,
            progress=self.progress,
            checkpoint=self.work.checkpoint.inside(f"{name}-work"),
            memory_limit=None if self.recipe.memory_limit is None else parse_bytes(self.recipe.memory_limit),
            folder=self.work.path,
            device=torch.device(self.device) if self.weights_device != self.device else None,
            choices=self.passport.recorded_choices(name),
            speed_guard=self._speed_guard(model),
            width_timer=self._width_timer(step, model),
        )
        torch.manual_seed(self.recipe.seed)
        untouched = _states(model)
        start = time.perf_counter()
        with PeakMemory() as memory, all_tokens(model.network):
            facts = step.apply(model, context)
        changed = _states(model) - untouched
        self._check_finite(model, {tensor for tensor, *_ in changed}, step, position, context)
        guarded = facts.pop("speed_guard", None)
        decided = {"speed_guard": {key: guarded[key] for key in ("device", "workload", "layers")}} if guarded else {}
        if measured := facts.pop("measured_alignment", None):
            decided["measured_alignment"] = measured
            self.say(f"alignment: widths in multiples of {measured['multiple']}, measured on {measured['device']}")
        model.history.append(
            {
                **step.with_choices(context.choices.made).to_json(),
                "seed": self.recipe.seed,
                "calibration": fingerprint(batches),
                **decided,
            }
        )
        record = {
            "name": step.name,
            "seconds": time.perf_counter() - start,
            "peak_bytes": max(memory.peak_bytes, memory.device_peak_bytes),
            "changed": {
                "tensors": len(changed),
                "parameters_removed": facts.pop("parameters_removed", 0),
            },
            "layers": facts.pop("layers", {}),
            "few_tokens": facts.pop("few_tokens", []),
            "facts": facts,
            "choices": context.choices.made,
            **({"speed_guard": guarded} if guarded else {}),
            **({"measured_alignment": measured} if measured else {}),
        }
        if guarded:
            self.say(guarded["sentence"])
        folder = self.work.path / name
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before the record of the step
        with atomic_folder(folder) as temporary:
            save_artifact(model, temporary)
        kept = {"record": json.loads(json_text(record)), "files": hash_folder(folder)}
        self.work.checkpoint.save_facts(name, kept)
        context.checkpoint.clear()
        return record

    def _speed_guard(self, model: Model) -> SpeedGuard | None:
        if self.recipe.guard is None:
            return None
        timer = LayerTimer(model, self.workload, self.device)
        return SpeedGuard(timer.time_ratio, timer.device_name, self.workload.name, self.recipe.guard.formats)

    def _width_timer(self, step: Method, model: Model) -> WidthTimer | None:
        if not step.times_layers:
            return None
        timer = LayerTimer(model, self.workload, self.device)
        return WidthTimer(timer.mean_seconds, timer.device_name, self.workload.name)

    def _check_finite(
        self, model: Model, changed: set[str], step: Method, position: int, context: MethodContext
    ) -> None:
        """Raise if a step left NaN or infinity in a tensor that it changed."""
        broken = find_non_finite((name, tensor) for name, tensor in _tensors(model) if name in changed)
        if broken is not None:
            context.checkpoint.clear()  # resuming would only bring it back
            raise ModelError(
                f"step {position + 1} ({step.name}) left NaN or infinity in {broken}; change its settings or its data."
            )


def _tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(model.network.named_parameters(), model.network.named_buffers())


def _states(model: Model) -> set[tuple[str, int, int]]:
    """Return each tensor's name, address and version: an entry missing from a later set was changed in between."""
    return {(name, tensor.data_ptr(), tensor._version) for name, tensor in _tensors(model)}
