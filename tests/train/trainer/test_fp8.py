"""Training runs in FP8: they learn, resume bit for bit, agree between ranks, and save a plain model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import smelt
from smelt.numerics.float_format import DLFLOAT16
from smelt.train.trainer.run_folder import RunFolder
from tests.train.trainer.runs import LLAMA, images, language, run_refused, run_training
from tests.train.trainer.test_run import everything, timeless

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp8", "fp8": {"scaling": "delayed", "amax_history_len": 4}, "gradient_accumulation_steps": 2},
        {"precision": "fp8-chunked", "optimizer": SGD, "steps": 4, "checkpoint": {"every": 2}},
    ],
    ids=["delayed", "chunked"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(changes: dict[str, Any], tmp_path: Path) -> None:
    """Amax histories, stochastic rounding and the loss scale continue where they were; two ranks hold the same."""
    content = language(tmp_path, **{"gradients": "none", **changes})
    uninterrupted = run_training(2, content, tmp_path / "run")
    steps = content["steps"]
    last = tmp_path / "run" / "checkpoints" / f"step-{steps}"
    expected = everything(last)
    if changes["precision"] == "fp8":
        history = load_file(last / "model.safetensors")["model.layers.0.mlp.gate_proj.gemm.amax_history"]
        assert history.shape == (4, 3) and (history > 0).all()
    shutil.rmtree(last)
    facts = RunFolder(tmp_path / "run").read_metadata()["low_precision"]
    resumed = run_training(2, content, tmp_path / "run", resume=True)
    assert timeless(resumed) == timeless(uninterrupted)
    assert everything(last) == expected
    assert RunFolder(tmp_path / "run").read_metadata()["low_precision"] == facts


def test_fp8_follows_bf16(tmp_path: Path) -> None:
    content = language(tmp_path, steps=30, gradients="none", evaluate={}, checkpoint={"every": None})
    losses = []
    for precision in ("bf16", "fp8"):
        out = tmp_path / precision
        log = run_training(1, {**content, "precision": precision}, out)
        losses.append([line["loss"] for line in log])
    assert losses[1] != losses[0] and losses[0][-1] < losses[0][0] - 0.5
    assert abs(losses[1][-1] - losses[0][-1]) < 0.1
    facts = RunFolder(tmp_path / "fp8").read_metadata()["low_precision"]
    assert facts["converted"] == 7 and facts["kept"] == {"lm_head": "the last layer"}
    assert facts["fp8"] == 0 and 0.4 < facts["emulated"] < 0.9
    assert not any("gemm" in name for name in load_file(tmp_path / "fp8" / "model" / "model.safetensors"))
    smelt.load(str(tmp_path / "fp8" / "model"))


def test_the_loss_scale_is_divided_out_before_clipping_and_weight_decay(tmp_path: Path) -> None:
    """Scales are powers of two: the same run except for what underflows in FP8."""
    optimizer = {**SGD, "weight_decay": 0.1}
    content = images(tmp_path, steps=3, precision="fp8-chunked", optimizer=optimizer, max_grad_norm=0.1, batch_size=4)
    logs, weights = [], []
    for scale in (512.0, 4096.0):
        out = tmp_path / f"{scale:g}"
        logs.append(run_training(1, {**content, "fp8_chunked": {"loss_scale": scale}}, out))
        weights.append(load_file(out / "checkpoints" / "step-3" / "model.safetensors"))
        for name, parameter in weights[-1].items():
            if "running" not in name and "num_batches" not in name:
                assert torch.equal(parameter, DLFLOAT16.round(parameter)), name
    for one, other in zip(*logs, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.02) and not one["skipped"]
        assert one["loss"] == pytest.approx(other["loss"], rel=0.01)


def test_what_cannot_be_trained_in_fp8_is_said_in_one_sentence(tmp_path: Path) -> None:
    content = language(tmp_path, precision="fp8", model={**LLAMA, "hidden_size": 24, "intermediate_size": 40})
    assert "no layer of this network can multiply in FP8" in run_refused(1, content, tmp_path / "a")[0]
    content = images(tmp_path, precision="fp8")
    assert "set fp8.convolutions" in run_refused(1, content, tmp_path / "b")[0]


@pytest.mark.slow
def test_a_compiled_run_equals_an_eager_one(tmp_path: Path) -> None:
    """`compile` compiles forward and backward of FP8 layers too; the first step, whose FLOPs are counted, is eager."""
    content = language(tmp_path, precision="fp8", steps=3, gradients="none", evaluate={}, checkpoint={"every": None})
    logs = [run_training(1, {**content, "compile": compile}, tmp_path / str(compile)) for compile in (False, True)]
    for eager, compiled in zip(*logs, strict=True):
        assert eager["loss"] == pytest.approx(compiled["loss"], abs=2e-2)
