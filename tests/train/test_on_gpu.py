"""Training on a GPU: the DDP hook with every compressor, steps without synchronization, the trainer.

NCCL refuses two ranks on one GPU, so ranks that share one use gloo; only the trainer runs under NCCL.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from smelt.train.gradients.comm import Comm
from smelt.train.gradients.compressor import Compressor
from smelt.train.gradients.compressors import SAGE, ExDyna, HardThreshold, MiCRO, TopK
from smelt.train.gradients.reducer import Reducer
from smelt.train.gradients.settings import CompressionSettings
from smelt.train.trainer.run_folder import RunFolder
from tests.train.parallel import run
from tests.train.synthetic import every_compressor, make_gradient, make_layout
from tests.train.test_ddp import train
from tests.train.trainer.runs import language, run_command, run_training, write_config

pytestmark = pytest.mark.gpu
DRAWN = {"randomk", "qsgd", "sage", "powersgd"}  # they draw random numbers, which differ on a GPU


def trained_with(compressors: list[Compressor], device: str) -> dict[str, Any]:
    """Return each rank's losses and final parameters, or its error."""
    results: dict[str, Any] = {}
    for compressor in compressors:
        try:
            results[compressor.name] = train(compressor, 8, device=device)
        except Exception as error:
            results[compressor.name] = f"{type(error).__name__}: {error}"
    return results


def test_every_compressor_trains_as_on_cpu() -> None:
    compressors = every_compressor(0.1)
    here, there = run(2, trained_with, compressors, "cuda")
    expected = run(2, trained_with, compressors, "cpu")[0]
    wrong = {name: result for name, result in here.items() if isinstance(result, str)}
    assert not wrong
    for name, (losses, parameters, steps) in here.items():
        assert (parameters == there[name][1]).all(), name  # bit for bit
        assert steps == 8, name
        assert all(map(math.isfinite, losses)), name
        if name not in DRAWN:
            assert losses[:3] == pytest.approx(expected[name][0][:3], rel=1e-3), name


@pytest.mark.parametrize("slots", [None, 2.0])
def test_a_process_group_for_gpu_tensors_only(slots: float | None) -> None:
    """As after `init_process_group("nccl")`: ranks still agree on CPU tensors."""
    compressor, settings = ExDyna(density=0.1, sampled_steps=2), CompressionSettings(fixed_capacity=slots)
    results = run(2, train, compressor, 5, None, 1, "cuda", settings, backend="cuda:gloo")
    expected = run(2, train, compressor, 5, None, 1, "cuda", settings)
    assert (results[0][1] == results[1][1]).all()
    assert results[0][0] == pytest.approx(expected[0][0], rel=1e-5)


def test_density_one_trains_like_plain_ddp() -> None:
    plain = run(2, train, None, 5, None, 1, "cuda")[0]
    dense = run(2, train, TopK(density=1.0), 5, 0.008, 1, "cuda")[0]
    assert dense[1] == pytest.approx(plain[1], abs=1e-5)
    assert plain[0] == pytest.approx(run(2, train, None, 5)[0][0], rel=1e-3)


@pytest.mark.parametrize("kind", [MiCRO, ExDyna, HardThreshold], ids=lambda kind: kind.name)
def test_a_fixed_capacity_step_does_not_synchronize(kind: Any) -> None:
    compressor = (
        HardThreshold(density=0.02, threshold=0.01) if kind is HardThreshold else kind(density=0.02, sampled_steps=0)
    )
    reducer = Reducer(compressor, make_layout(), Comm(), CompressionSettings(fixed_capacity=3.0), device="cuda")
    gradients = [make_gradient(reducer.layout, number, 0).cuda() for number in range(6)]
    for gradient in gradients[:2]:  # kernels are compiled and loaded
        reducer.reduce(gradient)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            gradients[0].sum().item()  # a hidden synchronization would be reported
        for gradient in gradients[2:]:
            reducer.reduce(gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reducer.resolve_deferred()
    assert reducer.iteration == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"gradients": "none", "precision": "bf16"},
        {
            "gradients": "exdyna:density=0.05,sampled_steps=2",
            "exchange": {"fixed_capacity": 2.0},
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 1.0,
        },
        {"gradients": "topk:density=0.05", "precision": "fp16"},
        {"gradients": "powersgd:rank=2,warmup_steps=2"},
        {"gradients": "auto"},
    ],
    ids=lambda changes: changes["gradients"].partition(":")[0],
)
def test_the_trainer_learns_and_resumes(changes: dict[str, Any], tmp_path: Path) -> None:
    content = language(tmp_path, device="cuda", **changes)
    uninterrupted = run_training(2, content, tmp_path / "run")
    assert uninterrupted[-1]["loss"] < uninterrupted[0]["loss"] - 0.05
    assert RunFolder(tmp_path / "run").read_metadata()["device"] == "cuda"
    last = tmp_path / "run" / "checkpoints" / "step-6"
    kept = load_file(last / "model.safetensors")
    shutil.rmtree(last)
    run_training(2, content, tmp_path / "run", resume=True)
    for name, tensor in load_file(last / "model.safetensors").items():
        assert torch.allclose(tensor, kept[name], atol=1e-3), name  # sums of a GPU have no fixed order


def test_the_command_runs_under_nccl(tmp_path: Path) -> None:
    content = language(
        tmp_path, device="cuda", gradients="exdyna:density=0.05,sampled_steps=2", exchange={"fixed_capacity": 2.0}
    )
    arguments = [str(write_config(tmp_path / "run.yaml", content)), "--out", str(tmp_path / "run")]
    ((code, stderr),) = run_command(1, arguments, tmp_path)
    assert code == 0, stderr
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "nccl" in facts["backend"]
    lines = RunFolder(tmp_path / "run").read_log()
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_nonfinite_gradient_fails_both_ranks() -> None:
    for compressor in (SAGE(density=0.1), MiCRO(density=0.1), TopK(density=0.1)):
        results = run(2, spoilt, compressor)
        assert all("not finite" in result for result in results), compressor


def spoilt(compressor: Compressor) -> str:
    """Return the error of a rank when its own or a peer's gradient is NaN."""
    workers = Comm()
    reducer = Reducer(compressor, make_layout(), workers, CompressionSettings(), device="cuda")
    gradient = make_gradient(reducer.layout, 0, workers.rank).cuda()
    reducer.reduce(gradient)
    if workers.rank:
        gradient[7] = torch.nan
    try:
        reducer.reduce(gradient)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
