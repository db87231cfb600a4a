"""Training steps as CUDA graphs: losses and weights as kernel by kernel; what cannot be captured still trains."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from smelt.compression.base import METHODS
from smelt.compression.distillation.samples import Samples
from smelt.compression.distillation.training_run import process_group
from smelt.train.trainer.config import CheckpointConfig, EvaluateConfig, OptimizerConfig, TrainConfig
from smelt.train.trainer.tasks import TrainingTask
from smelt.train.trainer.trainer import Trainer
from tests.compression.distillation.test_qat import FAST, W2A2, images, text, train
from tests.tiny import BUILDS, inputs

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


class Waiting(nn.Module):
    """Reads a value back in every forward pass, which no graph can do."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network, self.config = network, network.config

    def forward(self, **batch: Tensor) -> Any:
        assert batch["input_ids"].max().item() > 0
        return self.network(**batch)


def gpt() -> Any:
    """Build a network with dropout, whose random numbers a graph has to draw anew in each step."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.2, embd_pdrop=0.2)
    return GPT2LMHeadModel(config)


def run(network: Any, folder: Path, **changes: Any) -> tuple[list[float], Trainer]:
    """Train on texts of two lengths; return the losses and the trainer."""
    batches = text(96)
    for index, batch in enumerate(batches):
        batch["attention_mask"][:, 16 if index % 2 else 32 :] = 0
    samples = Samples.from_batches(batches, CUDA, augment=False, seed=0)
    config = TrainConfig(
        model="tiny", batch_size=8, steps=12, gradients="none", optimizer=OptimizerConfig(lr=1e-2), device="cuda",
        evaluate=EvaluateConfig(samples=8), checkpoint=CheckpointConfig(every=None), **changes,
    )  # fmt: skip
    task = TrainingTask(network, samples, samples, False, saves_model=False)
    with process_group(CUDA):
        trainer = Trainer(config, folder, CUDA, resume=False, resplit=False, task=task)
        return [entry["loss"] for entry in trainer.steps()], trainer


@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation_steps": 2}, {"precision": "bf16"}, {"precision": "fp16"}, {"max_grad_norm": 0.5}],
    ids=str,
)
def test_graphs_train_as_kernel_by_kernel(changes: dict[str, Any], tmp_path: Path) -> None:
    expected, eager = run(gpt(), tmp_path / "eager", cuda_graphs=False, **changes)
    losses, graphed = run(gpt(), tmp_path / "graphed", **changes)
    assert eager.cuda_graphs is None and graphed.cuda_graphs is not None
    assert graphed.cuda_graphs.replays >= 8 and graphed.cuda_graphs.is_enabled
    assert losses == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(graphed.task.network.parameters(), eager.task.network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_graphs_leave_no_memory_behind(tmp_path: Path) -> None:
    """A method that trains several times, as the search for a budget does, has the memory of one training."""
    trainers, sizes = [], []
    for index in range(3):
        trainers.append(run(gpt(), tmp_path / str(index))[1])
        segments = [each for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] != (0, 0)]
        sizes.append(sum(each["total_size"] for each in segments))
    assert all(each.cuda_graphs is not None and each.cuda_graphs.replays >= 8 for each in trainers)
    assert sizes[2] == sizes[1] == sizes[0]  # libraries may keep buffers of the first capture


def test_every_step_draws_other_random_numbers(tmp_path: Path) -> None:
    """With a learning rate of almost zero, the losses of one batch differ by dropout only."""
    batch = text(8)
    samples = Samples.from_batches(batch, CUDA, augment=False, seed=0)
    config = TrainConfig(
        model="tiny", batch_size=8, steps=8, gradients="none", optimizer=OptimizerConfig(lr=1e-12), device="cuda"
    )
    with process_group(CUDA):
        task = TrainingTask(gpt(), samples, samples, False, saves_model=False)
        trainer = Trainer(config, tmp_path / "run", CUDA, resume=False, resplit=False, task=task)
        losses = [entry["loss"] for entry in trainer.steps()]
    assert trainer.cuda_graphs is not None and trainer.cuda_graphs.replays >= 5
    assert len(set(losses[3:])) == 5


def test_a_network_that_waits_for_the_gpu_trains_eagerly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected, _ = run(gpt(), tmp_path / "eager", cuda_graphs=False)
    with caplog.at_level(logging.WARNING):
        losses, trainer = run(Waiting(gpt()), tmp_path / "run")
    assert trainer.cuda_graphs is not None and not trainer.cuda_graphs.is_enabled
    assert "cannot be captured as a CUDA graph" in caplog.text
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["qat", "speq"])
def test_a_quantized_resnet_learns(name: str, tmp_path: Path) -> None:
    method = METHODS.build(name, **W2A2, **FAST)
    network = BUILDS["resnet"]().to(CUDA)
    _, facts = train(method, network, images(), tmp_path)
    assert facts["loss_curve"][0][1] > 2 * facts["loss_curve"][-1][1]
    assert facts["conversion_error"] < 1e-4


def test_teacher_intervention_in_graphs(tmp_path: Path) -> None:
    """Each intervention has kernels of its own."""
    batch = inputs("bert", batch=16)
    batch["labels"] = torch.randint(2, (16,), generator=torch.Generator().manual_seed(0))
    settings = {"batch_size": 8, "epochs": 12, "intervention_steps": 20, "optimizer": {"lr": 1e-3}, "mode": "inverted"}
    curves = []
    for graphs in (False, True):
        method = METHODS.build("teacher-intervention", cuda_graphs=graphs, **settings)
        torch.manual_seed(0)
        _, facts = train(method, BUILDS["bert"]().to(CUDA), [batch] * 2, tmp_path / str(graphs))
        curves.append([loss for _, loss in facts["loss_curve"]])
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)
