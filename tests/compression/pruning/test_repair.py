"""Repairs after pruning: the Gram identity, solvers against closed forms, and exact recovery."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from smelt.compression.base import MethodContext
from smelt.compression.calibration.least_squares import NormalEquations, unit_equations
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.pruning.repair import (
    RepairSettings,
    cut,
    cut_and_repair,
    lsmr_solve,
    reconstruct,
    ridge_solve,
    tune_scales,
)
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from tests.tiny import BUILDS, TRANSFORMERS, labeled


def problem(units: int = 5, width: int = 3, outputs: int = 7, rows: int = 200) -> tuple[torch.Tensor, ...]:
    inputs = torch.randn(rows, units * width)
    weight = torch.randn(outputs, units * width)
    targets = torch.randn(rows, outputs)
    return inputs, weight, targets


def build_equations(inputs: torch.Tensor, targets: torch.Tensor, chunks: int = 3) -> NormalEquations:
    equations = NormalEquations.zeros(inputs.shape[1], targets.shape[1], inputs.device)
    for x, b in zip(inputs.chunk(chunks), targets.chunk(chunks), strict=True):
        equations.add(x, b)
    return equations


def contributions(inputs: torch.Tensor, weight: torch.Tensor, width: int) -> torch.Tensor:
    """Build A explicitly: column i is unit i's contribution, tokens x outputs flattened."""
    columns = [
        (inputs[:, i : i + width] @ weight[:, i : i + width].T).flatten() for i in range(0, inputs.shape[1], width)
    ]
    return torch.stack(columns, 1).double()


@pytest.mark.parametrize("width", [1, 3])
def test_gram_identity(width: int) -> None:
    inputs, weight, targets = problem(width=width)
    explicit = contributions(inputs, weight, width)
    gram, right = unit_equations(build_equations(inputs, targets), weight, width)
    assert torch.allclose(gram, explicit.T @ explicit, rtol=1e-5, atol=1e-3)
    assert torch.allclose(right, explicit.T @ targets.flatten().double(), rtol=1e-5, atol=1e-3)


def test_intercept_is_a_column_of_ones() -> None:
    inputs, weight, targets = problem()
    explicit = contributions(inputs, weight, 3)
    with_ones = torch.cat([explicit, torch.ones(len(explicit), 1).double()], 1)
    gram, right = with_ones.T @ with_ones, with_ones.T @ targets.flatten().double()
    expected = 1 + ridge_solve(gram, right - gram.sum(1), 0.01)[:-1]
    equations = build_equations(inputs, targets)
    scales = tune_scales(equations, weight, 3, solver="ridge", damping=0.01, intercept=True)
    assert scales is not None and torch.allclose(scales, expected, atol=1e-4)


def test_lsmr_gives_the_damped_solution() -> None:
    matrix = torch.randn(12, 12).double() / 4
    gram, right = matrix.T @ matrix + torch.eye(12).double(), torch.randn(12).double()
    expected = torch.linalg.solve(gram @ gram + torch.eye(12).double(), gram @ right)
    result = lsmr_solve(gram, right)
    assert result is not None and torch.allclose(result, expected, atol=1e-4)


def test_one_unit_does_not_crash_the_solver() -> None:
    result = lsmr_solve(torch.tensor([[4.0]]).double(), torch.tensor([2.0]).double())
    assert result is not None and result.item() == 0.5


@pytest.mark.parametrize("intercept", [False, True])
def test_reconstruction_recovers_an_existing_projection(intercept: bool) -> None:
    inputs, weight, _ = problem(rows=400)
    truth, offset = torch.randn_like(weight), torch.randn(weight.shape[0]) * intercept
    result, bias = reconstruct(
        build_equations(inputs, inputs @ truth.T + offset), weight, damping=1e-8, intercept=intercept
    )
    assert torch.allclose(result.float(), truth, atol=1e-3)
    assert (bias is not None) == intercept and (bias is None or torch.allclose(bias.float(), offset, atol=1e-3))


def test_heavy_damping_keeps_the_old_weights() -> None:
    inputs, weight, targets = problem()
    result, _ = reconstruct(build_equations(inputs, targets), weight, damping=1e9, intercept=False)
    assert torch.allclose(result.float(), weight, atol=1e-4)


def everything(network: torch.nn.Module) -> list[np.ndarray]:
    return [np.arange(part.units) for part in anatomy_of(network).parts]


def half(network: torch.nn.Module) -> list[np.ndarray]:
    return [np.arange(0, part.units, 2) for part in anatomy_of(network).parts]


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("kind", ["tune", "full"])
def test_an_unpruned_network_is_unchanged(name: str, kind: str) -> None:
    """Student and teacher agree, so the fit must return the current weights; a wrong residual would show."""
    network = BUILDS[name]()
    batches = [labeled(name, seed) for seed in range(3)]
    with torch.no_grad():
        before = network(**batches[0]).logits
    settings = RepairSettings(kind, solver="ridge", damping=1e-4)
    cut_and_repair(Model(network), everything(network), settings, MethodContext(batches=batches))
    with torch.no_grad():
        assert (network(**batches[0]).logits - before).abs().max() < 1e-3


@torch.no_grad()
def last_states(network: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    inputs = [{name: tensor for name, tensor in batch.items() if name != "labels"} for batch in batches]
    return torch.cat([network.base_model(**batch).last_hidden_state for batch in inputs])


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("kind", ["tune", "full"])
def test_repair_reduces_the_error_of_the_last_hidden_states(name: str, kind: str) -> None:
    batches = [labeled(name, seed) for seed in range(8)]
    expected = last_states(BUILDS[name](), batches)
    plain, network = BUILDS[name](), BUILDS[name]()
    cut(plain, half(plain))
    cut_and_repair(Model(network), half(network), RepairSettings(kind, solver="ridge"), MethodContext(batches=batches))
    assert (last_states(network, batches) - expected).norm() < (last_states(plain, batches) - expected).norm()


@pytest.mark.parametrize("kind", ["tune", "full"])
def test_a_resumed_repair_is_bit_identical(kind: str, tmp_path: Path) -> None:
    batches = [labeled("llama", seed) for seed in range(3)]
    uninterrupted, resumed = BUILDS["llama"](), BUILDS["llama"]()
    settings = RepairSettings(kind, solver="ridge")
    cut_and_repair(
        Model(uninterrupted),
        half(uninterrupted),
        settings,
        MethodContext(batches=batches, checkpoint=Checkpoint(tmp_path)),
    )
    (tmp_path / "block-002.safetensors").unlink()
    cut_and_repair(
        Model(resumed), half(resumed), settings, MethodContext(batches=batches, checkpoint=Checkpoint(tmp_path))
    )
    for name, tensor in uninterrupted.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_spilling_past_the_memory_limit_changes_nothing(tmp_path: Path) -> None:
    batches = [labeled("bert", seed) for seed in range(3)]
    in_memory, spilled = BUILDS["bert"](), BUILDS["bert"]()
    cut_and_repair(Model(in_memory), half(in_memory), RepairSettings("full"), MethodContext(batches=batches))
    context = MethodContext(batches=batches, memory_limit=1, folder=tmp_path)
    cut_and_repair(Model(spilled), half(spilled), RepairSettings("full"), context)
    assert all(torch.equal(a, b) for a, b in zip(in_memory.parameters(), spilled.parameters(), strict=True))
