"""Estimate what a recipe will cost and change, before any work and without loading weights.

Memory is the sum of what exists at once; time follows from the passes of each step and the speed of a short matrix
product on this machine. A run that cannot fit is refused here.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from smelt.compression.base import CalibrationSize
from smelt.compression.recipe.batch import resolve_batch_size
from smelt.compression.recipe.inputs import needs_data
from smelt.compression.recipe.recipe import Recipe, parse_bytes
from smelt.compression.recipe.step_checks import check_steps
from smelt.errors import ModelError, ResourceError
from smelt.export.opens import Opener, opens_in
from smelt.files import explain_disk_errors
from smelt.measure.cost import (
    Workload,
    active_parameters,
    block_cost,
    block_parameters,
    count_bytes,
    count_parameters,
)
from smelt.measure.memory import free_disk, free_memory, resident_bytes
from smelt.models.anatomy import Anatomy
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.artifact import has_program
from smelt.models.load import resolve, skeleton
from smelt.models.model import Model
from smelt.report.numbers import size as format_size

EFFICIENCY = 0.5  # speed of complete blocks relative to a large matrix product
BYTES_PER_TOKEN = 24  # of calibration data: token id, mask and label


@dataclass(frozen=True)
class StepPlan:
    """One step: seconds, bytes besides the weights, and the budget it will meet."""

    method: str
    needs: tuple[str, ...]
    seconds: float
    memory: int
    budget: dict[str, float]


@dataclass(frozen=True)
class CompressionPlan:
    """A complete run. Bytes and seconds are estimates; parameters are exact before, and an upper bound after."""

    model: str
    parameters: int
    block_parameters: int
    block_parameters_after: int
    bytes: int
    bytes_after: int  # an estimate; with a budget of MACs or latency, an upper bound
    macs: float
    peak_memory: int
    available_memory: int
    disk: int
    free_disk: int
    seconds: float
    steps: tuple[StepPlan, ...]
    opens_in: tuple[str, ...]  # the programs that will open the result
    device: str = "cpu"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check(self) -> None:
        """Raise ResourceError if the run does not fit in memory or on disk."""
        if self.peak_memory > self.available_memory:
            raise ResourceError(
                f"this run needs about {format_size(self.peak_memory)} of memory and "
                f"{format_size(self.available_memory)} is free; use fewer or shorter samples, a smaller batch, "
                "or set memory_limit in the recipe."
            )
        if self.disk > self.free_disk:
            raise ResourceError(
                f"this run needs about {format_size(self.disk)} of disk and {format_size(self.free_disk)} is free; "
                "free some space or write to another disk."
            )


def plan(source: str, recipe: Recipe, folder: str | Path = ".", *, device: str = "cpu") -> CompressionPlan:
    """Plan a run of the recipe on a model and a device, to be written to a folder."""
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ResourceError(f"there is no GPU here to plan for {device}; use --device cpu.")
    recipe = recipe.for_device(device)
    if has_program(resolve(source, config_only=True)):
        raise ModelError(f"{source} runs a program, which no step can change; compress what it was made from.")
    network = skeleton(source)
    anatomy = anatomy_of(network)
    reshaped = skeleton(source)
    check_steps(reshaped, recipe)
    limit = None if recipe.memory_limit is None else parse_bytes(recipe.memory_limit)
    data = resolve_batch_size(recipe, anatomy, where).data
    assert data.batch_size is not None
    size = CalibrationSize(data.samples, _positions(anatomy, data.seq_len), data.batch_size)
    rate = EFFICIENCY * matrix_speed(where)
    steps = tuple(_step_plan(step, anatomy, size, limit, rate) for step in recipe.steps)
    weights = count_bytes(network)
    batches = BYTES_PER_TOKEN * size.tokens if needs_data(recipe) else 0
    before = block_parameters(anatomy)
    active = count_parameters(network) - before + active_parameters(anatomy)
    evaluation = 3 * 2 * active * (recipe.evaluate.limit or 300_000) / rate
    resident = resident_bytes() if where.type == "cpu" else 0  # what torch already takes
    with explain_disk_errors(Path(folder)):
        free = free_disk(folder)
    return CompressionPlan(
        model=source,
        parameters=count_parameters(network),
        block_parameters=before,
        block_parameters_after=_parameters_after(recipe, anatomy, before),
        bytes=weights,
        bytes_after=_bytes_after(recipe, anatomy, weights),
        macs=_macs(anatomy),
        # Two models exist at once while they are compared.
        peak_memory=weights + max([weights, *(step.memory for step in steps)]) + batches + resident,
        available_memory=free_memory(where) + resident,
        disk=2 * weights,
        free_disk=free,
        seconds=sum(step.seconds for step in steps) + evaluation,
        steps=steps,
        opens_in=_opens_in(recipe, Model(reshaped)),
        device=device,
    )


def _opens_in(recipe: Recipe, model: Model) -> tuple[str, ...]:
    """Return the programs that are certain to open a result of this shape; the model is on the meta device."""
    certain = all(step.keeps_plain_shape for step in recipe.steps)
    return tuple(str(opener) for opener in (opens_in(model) if certain else [Opener("Smelt")]))


def _step_plan(step: Any, anatomy: Anatomy, size: CalibrationSize, limit: int | None, rate: float) -> StepPlan:
    estimate = step.estimate_resources(anatomy, size, limit)
    work = 2.0 * active_parameters(anatomy) * size.tokens * estimate.passes
    return StepPlan(step.name, step.needs, work / rate, estimate.memory, step.targets())


def _parameters_after(recipe: Recipe, anatomy: Anatomy, before: int) -> int:
    """Return an upper bound on the block parameters after all steps, from their budgets and what they add."""
    share, added = 1.0, 0
    for step in recipe.steps:
        budget = getattr(step, "budget", None)
        if budget is not None and budget.measure == "parameters":
            share *= budget.keep
        added += step.added_parameters(anatomy)
    return int(before * share) + added


def _bytes_after(recipe: Recipe, anatomy: Anatomy, weights: int) -> int:
    """Estimate the bytes of the result: pruning scales what the other steps make of the blocks."""
    blocks = sum(count_bytes(block.module) for block in anatomy.blocks)
    share, changed = 1.0, blocks
    for step in recipe.steps:
        budget = getattr(step, "budget", None)
        if budget is not None and budget.measure in ("parameters", "bytes"):
            share *= budget.keep
        changed += step.bytes_change(anatomy)
    return weights - blocks + int(share * changed)


def _positions(anatomy: Anatomy, seq_len: int) -> int:
    """Return the tokens of a sample, 1 of an observation; of an image, how often each weight is used on average."""
    if anatomy.network.main_input_name == "observations":
        return 1
    if anatomy.network.main_input_name != "pixel_values":
        return seq_len
    return max(1, round(_macs(anatomy) / block_parameters(anatomy)))


def _macs(anatomy: Anatomy) -> float:
    if any(part.kind == "channels" for part in anatomy.parts):
        size = getattr(anatomy.network.config, "image_size", None) or 224
        return block_cost(anatomy, "macs", Workload(image_size=size))
    return block_cost(anatomy, "macs", Workload())


def matrix_speed(device: torch.device, size: int = 1024, seconds: float = 0.3) -> float:
    """Return the FLOP/s of a float32 matrix product on a device."""
    size = size if device.type == "cpu" else 8 * size  # a small one would time the launch of its kernel
    left, right = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    left @ right
    wait()
    start, products = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        left @ right
        wait()
        products += 1
    return 2.0 * size**3 * products / (time.perf_counter() - start)
