"""Quantized policies: QAIL, QBC and SQIL on demonstrations of a known expert."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smelt.compression.base import METHODS, Batch, MethodContext
from smelt.compression.distillation.fake_quantize import fake_quantized_layers
from smelt.compression.distillation.losses import SAMPLE_WEIGHTS, Qbc
from smelt.compression.distillation.sqil import importance_weights, state_importance
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.teachers import DenseTeacher
from smelt.errors import DataError, ModelError, RecipeError
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.mlp_policy import MlpPolicy, MlpPolicyConfig
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from smelt.models.verify import verify
from tests.tiny import BUILDS

FAST = {"batch_size": 32, "epochs": 8, "optimizer": {"name": "adamw", "lr": 0.005}}
W2A2 = {"weights": {"quantizer": "lsq", "weight_format": "int2/row"}, "inputs": {"quantizer": "lsq", "bits": 2}}


def demonstrations(action_space: str, count: int = 512) -> Batch:
    """Return states and the actions of an expert: which feature is largest, or the difference of two."""
    observations = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    actions = (
        observations[:, :3].argmax(-1) if action_space == "discrete" else observations[:, :3] - observations[:, 1:]
    )
    return {"observations": observations, "labels": actions}


def policy(action_space: str, batch: Batch, *, activation: str = "relu") -> Model:
    """Return a float policy that has learned the demonstrations."""
    torch.manual_seed(0)
    sizes = {"action_size": 3, "hidden_size": 32, "hidden_act": activation}
    network = MlpPolicy(MlpPolicyConfig(action_space=action_space, **sizes))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        network(**batch).loss.backward()
        optimizer.step()
    return Model(network.eval(), source="tiny")


def apply(model: Model, batch: Batch, folder: Path, name: str, **parameters: Any) -> dict[str, Any]:
    return METHODS.build(name, **parameters).apply(model, MethodContext(batches=[batch], seed=0, folder=folder))


@torch.no_grad()
def outputs(model: Model, batch: Batch) -> Tensor:
    return model.network(batch["observations"]).logits


@pytest.mark.parametrize(("name", "action_space"), [("qail", "discrete"), ("sqil", "continuous")])
def test_a_quantized_policy_learns_and_is_packed(name: str, action_space: str, tmp_path: Path) -> None:
    batch = demonstrations(action_space)
    model = policy(action_space, batch)
    before = outputs(model, batch)
    facts = apply(model, batch, tmp_path, name, **FAST)
    assert set(quantized_layers(model.network)) == {"layers.0.dense", "layers.1.dense"}
    assert not fake_quantized_layers(model.network) and facts["bits"] == 4 and facts["conversion_error"] < 1e-5
    assert ("validation_accuracy" in facts) == (action_space == "discrete") and "validation_perplexity" not in facts
    assert (outputs(model, batch) - before).square().mean() < 0.1 * before.square().mean()
    (tmp_path / "saved").mkdir()
    save_artifact(model, tmp_path / "saved")
    verify(model, tmp_path / "saved")
    assert {file.suffix for file in (tmp_path / "saved").iterdir()} == {".json", ".safetensors"}
    assert torch.equal(outputs(load_artifact(tmp_path / "saved"), batch), outputs(model, batch))


def test_qbc_keeps_the_outputs_of_the_float_policy(tmp_path: Path) -> None:
    batch = demonstrations("discrete")
    differences = {}
    for losses in ([{"loss": "labels"}], [{"loss": "labels"}, {"loss": "qbc"}]):
        model = policy("discrete", batch)
        before = outputs(model, batch)
        apply(model, batch, tmp_path, "qail", losses=losses, **W2A2, **FAST)
        differences[len(losses)] = float((outputs(model, batch) - before).square().mean())
    assert differences[2] < 0.5 * differences[1]


def test_an_unquantized_student_has_no_qbc() -> None:
    batch = demonstrations("discrete", 16)
    student = Student(policy("discrete", batch).network, (Qbc(),), DenseTeacher(policy("discrete", batch).network))
    assert float(student.train()(**batch).loss.detach()) == 0.0


def test_qbc_counts_samples_by_their_weights() -> None:
    ours, theirs = torch.tensor([[1.0, 2.0], [0.0, 4.0]]), torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    student, teacher = SimpleNamespace(logits=ours), SimpleNamespace(logits=theirs)
    assert float(Qbc().compute(student, teacher, {})) == (4 / 2 + 13 / 2) / 2
    assert float(Qbc().compute(student, teacher, {SAMPLE_WEIGHTS: torch.tensor([2.0, 1.0])})) == (4 + 13 / 2) / 2


def test_the_importance_of_a_state_is_the_mean_change_of_the_outputs() -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 3.0]])

    class Linear(nn.Module):
        def forward(self, observations: Tensor) -> Any:
            return SimpleNamespace(logits=observations @ weight.T)

    observations = torch.tensor([[0.0, 0.0], [2.0, 0.0], [4.0, 3.0]])  # mean: 2, 1
    # Replacing feature 0 changes the outputs by 1 (x0 - 2), replacing feature 1 by 3 (x1 - 1).
    expected = torch.tensor([(4 + 9) / 2, (0 + 9) / 2, (4 + 36) / 2])
    torch.testing.assert_close(state_importance(Linear(), observations), expected)


def test_only_the_most_important_states_count_more() -> None:
    weights = importance_weights(torch.tensor([5.0, 1.0, 9.0, 2.0, 3.0, 0.0, 7.0, 8.0, 4.0, 6.0]), 0.2, 2.0)
    assert weights.tolist() == [1, 1, 2, 1, 1, 1, 1, 2, 1, 1]
    assert importance_weights(torch.ones(4), 0.0, 2.0).tolist() == [1] * 4


def test_sqil_changes_only_the_gradient_of_important_states() -> None:
    batch = demonstrations("continuous", 20)
    theirs = SimpleNamespace(logits=torch.zeros(20, 3))
    importance = state_importance(policy("continuous", batch).network, batch["observations"])
    gradients = []
    for weighted in ({}, {SAMPLE_WEIGHTS: importance_weights(importance, 0.2, 2.0)}):
        logits = torch.ones(20, 3, requires_grad=True)
        Qbc().compute(SimpleNamespace(logits=logits), theirs, weighted).backward()
        gradients.append(logits.grad)
    important = importance >= importance.sort().values[-4]
    torch.testing.assert_close(gradients[1][important], 2 * gradients[0][important])
    assert torch.equal(gradients[1][~important], gradients[0][~important]) and int(important.sum()) == 4


def test_sqil_without_more_weight_is_qail(tmp_path: Path) -> None:
    batch, results = demonstrations("continuous", 64), []
    for name, parameters in (("qail", {}), ("sqil", {"importance_weight": 1.0}), ("sqil", {"importance_weight": 50.0})):
        model = policy("continuous", batch)
        apply(model, batch, tmp_path, name, **{**FAST, "epochs": 2}, **parameters)
        results.append(outputs(model, batch))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_bad_input_is_refused_with_one_sentence(tmp_path: Path) -> None:
    batch = demonstrations("discrete", 64)
    with pytest.raises(RecipeError, match=r"sqil weights states in the loss qbc; add `\{loss: qbc\}`"):
        METHODS.build("sqil", losses=[{"loss": "labels"}])
    with pytest.raises(RecipeError, match="important_fraction of sqil must lie"):
        METHODS.build("sqil", important_fraction=1.5)
    with pytest.raises(RecipeError, match="groups of 128 do not divide"):  # as in every training
        coarse = {"quantizer": "minmax", "weight_format": "int4/128"}
        METHODS.build("sqil", weights=coarse).check(policy("discrete", batch).anatomy)
    with pytest.raises(RecipeError, match="qail compares all outputs of the teacher; remove `cache_logits`"):
        METHODS.build("qail", cache_logits=10)
    with pytest.raises(ModelError, match="sqil perturbs the observations of a policy, and this model reads none"):
        METHODS.build("sqil").check(Model(BUILDS["llama"]()).anatomy)
    with pytest.raises(DataError, match=r"negative values, which unsigned lsq sets to zero.* `signed: true`"):
        apply(policy("discrete", batch, activation="tanh"), batch, tmp_path, "qail", **FAST)
    MlpPolicy(MlpPolicyConfig(action_size=5)).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"has action_size 5 and the student 3; a teacher needs the same"):
        apply(policy("discrete", batch), batch, tmp_path, "qail", teacher=str(tmp_path / "other"), **FAST)
