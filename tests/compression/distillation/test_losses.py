"""Loss terms against their formulas, and the card's limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from smelt.compression.base import METHODS, CalibrationSize
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.distillation.losses import LOSSES, LossTerm, token_weights
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.teachers import DenseTeacher
from smelt.errors import RecipeError
from smelt.models.model import Model
from tests.tiny import BUILDS


def outputs(*shape: int, seed: int = 0) -> Any:
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(logits=logits, loss=torch.tensor(1.25))


@pytest.mark.parametrize("name", ["logits", "cosine"])
def test_a_student_like_its_teacher_has_no_loss(name: str) -> None:
    same = outputs(4, 7)
    assert float(LOSSES.build(name).compute(same, same, {})) == pytest.approx(0, abs=1e-6)
    assert float(LOSSES.build(name).compute(outputs(4, 7, seed=1), same, {})) > 0.05


def test_logits_are_a_kl_divergence() -> None:
    student, teacher = outputs(4, 7, seed=1), outputs(4, 7, seed=2)
    expected = F.kl_div(F.log_softmax(student.logits / 2, -1), F.softmax(teacher.logits / 2, -1), reduction="batchmean")
    assert torch.allclose(LOSSES.build("logits", temperature=2.0).compute(student, teacher, {}), 4 * expected)


@pytest.mark.parametrize("name", ["logits", "cosine"])
def test_padding_does_not_count(name: str) -> None:
    student, teacher = outputs(2, 5, 7, seed=1), outputs(2, 5, 7, seed=2)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    term = LOSSES.build(name)
    whole = term.compute(student, teacher, {"attention_mask": mask})
    student.logits[1, 2:] = 100 * torch.randn(3, 7)
    assert torch.allclose(term.compute(student, teacher, {"attention_mask": mask}), whole)


def test_the_gradient_of_cosine_is_the_papers() -> None:
    student, teacher = outputs(1, 7, seed=1), outputs(1, 7, seed=2)
    student.logits.requires_grad_()
    LOSSES.build("cosine").compute(student, teacher, {}).backward()
    p, t = (F.softmax(out.logits.detach()[0], -1) for out in (student, teacher))
    of_p = -t / (t.norm() * p.norm()) + (t @ p) * p / (t.norm() * p.norm() ** 3)
    expected = (torch.diag(p) - torch.outer(p, p)) @ of_p
    assert torch.allclose(student.logits.grad[0], expected, atol=1e-6)


def test_token_weights() -> None:
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(2, 6, 9), torch.randint(9, (2, 6))
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 6)
    weights = token_weights(logits, labels, 10.0)
    assert torch.allclose(weights.sum(-1), torch.ones(2))
    assert torch.equal(weights.argsort(-1), losses.argsort(-1)), "what the teacher finds hard counts more"
    assert torch.allclose(token_weights(logits, labels, 1e6), torch.full((2, 6), 1 / 6), atol=1e-5)
    labels[0, 3:] = -100
    labels[1] = -100
    ignored = token_weights(logits, labels, 10.0)
    assert ignored[0, 3:].abs().sum() == 0 and ignored[0].sum() == pytest.approx(1) and ignored[1].abs().sum() == 0


def test_token_scaled_logits_with_equal_weights_are_plain_distillation() -> None:
    student, teacher, labels = outputs(2, 6, 9, seed=1), outputs(2, 6, 9, seed=2), torch.randint(9, (2, 6))
    plain = -(F.softmax(teacher.logits, -1) * F.log_softmax(student.logits, -1)).sum(-1)[:, :-1].mean()
    term = LOSSES.build("token-scaled-logits", temperature=1e6)
    assert torch.allclose(term.compute(student, teacher, {"labels": labels}), plain, atol=1e-4)


@pytest.mark.parametrize("name", ["hidden-states", "attention-output", "attention-map", "attention-score"])
def test_losses_of_intermediate_outputs_are_their_formulas(name: str) -> None:
    """Two blocks, two samples of three tokens and one; what belongs to padding differs, and must not count."""
    torch.manual_seed(0)
    term, (kind,) = LOSSES.build(name), LOSSES.build(name).intermediates
    shape = (2, 3, 5) if "attention-" not in name or name == "attention-output" else (2, 4, 3, 3)
    tensors = [[torch.randn(shape) for _ in range(2)] for _ in range(2)]
    if name == "attention-map":
        tensors = [[tensor.softmax(-1) for tensor in blocks] for blocks in tensors]
    student, teacher = (SimpleNamespace(intermediates={kind: blocks}) for blocks in tensors)
    tokens = [3, 1]
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    expected = []
    for ours, theirs in zip(*tensors, strict=True):
        if name == "attention-score":
            theirs[0, :, 1, 2] = -1e9  # masked by the teacher
        samples = [(o[..., :count, :], t[..., :count, :]) for o, t, count in zip(ours, theirs, tokens, strict=True)]
        if name == "attention-map":
            values = [(t * (t / o).log()).sum(-1).mean() for o, t in samples]
        elif name == "attention-score":
            squares = [(o - t).square()[t > -100] for o, t in samples]
            values = [torch.cat(squares).mean()]
        else:
            values = [(o - t).square().mean() for o, t in samples]
            values = [sum(value * count for value, count in zip(values, tokens, strict=True)) / sum(tokens)]
        expected.append(sum(values) / len(values))
    assert torch.allclose(term.compute(student, teacher, {"attention_mask": mask}), torch.stack(expected).sum())
    plain = term.compute(student, teacher, {})
    assert torch.allclose(plain, term.compute(student, teacher, {"attention_mask": torch.ones(2, 3).long()}))


def test_the_error_of_a_single_score_is_its_square() -> None:
    student, teacher = (
        SimpleNamespace(intermediates={"attention_scores": [torch.full((1, 1, 1, 1), x)]}) for x in (1.0, 3.0)
    )
    assert float(LOSSES.build("attention-score").compute(student, teacher, {})) == 4


def test_temperatures_have_limits() -> None:
    for name, largest in (("logits", 100.0), ("cosine", 100.0), ("token-scaled-logits", 1e6)):
        LOSSES.build(name, temperature=largest)
        for temperature in (0.009, largest * 1.01):
            with pytest.raises(RecipeError, match=f"temperature of {name} must lie"):
                LOSSES.build(name, temperature=temperature)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_terms_reach_the_student_only(name: str) -> None:
    student, teacher = outputs(2, 6, 9, seed=1), outputs(2, 6, 9, seed=2)
    term: LossTerm = LOSSES.build(name)
    for out in (student, teacher):
        out.logits.requires_grad_()
        out.intermediates = {each: [out.logits[:, None].softmax(-1)] for each in term.intermediates}
    student.loss = student.logits.mean()
    loss: Tensor = term.compute(student, teacher, {"labels": torch.randint(9, (2, 6))})
    loss.backward()
    assert student.logits.grad is not None and student.logits.grad.abs().sum() > 0 and teacher.logits.grad is None
    assert LossTerm.from_config(term.to_json()) == term


def test_labels_reach_a_network_whose_loss_counts_only() -> None:
    """In training; a large vocabulary makes an unused loss expensive. The held-out loss is always the network's own."""
    network, batch = BUILDS["llama"](), {"input_ids": torch.arange(8).view(1, 8), "labels": torch.arange(8).view(1, 8)}
    given: list[bool] = []
    network.register_forward_pre_hook(lambda _, args, kwargs: given.append("labels" in kwargs), with_kwargs=True)
    teacher = DenseTeacher(BUILDS["llama"]())
    terms = LOSSES.build("logits"), LOSSES.build("labels")
    losses = []
    for losses_of in (terms[:1], terms[1:], terms):
        student = Student(network, losses_of, teacher)
        losses += [float(student.train(training)(**batch).loss.detach()) for training in (True, False)]
    assert given == [False, True, True, True, True, True]
    assert losses[4] == pytest.approx(losses[0] + losses[2], rel=1e-5) and losses[1] == losses[3] == losses[5]


def test_the_plan_counts_activations_in_the_dtype_of_training() -> None:
    anatomy, size = Model(BUILDS["bert"]()).anatomy, CalibrationSize(samples=64, seq_len=128, batch_size=4)
    methods = [METHODS.build("qat", weights={"quantizer": "twn"}, precision=name) for name in ("off", "bf16")]
    memory = [method.estimate_resources(anatomy, size, None).memory for method in methods]
    assert memory[0] - memory[1] == gradient_bytes(anatomy, 32, 128) / 2, "an encoder has no float32 logits to keep"


def test_the_plan_counts_the_teacher_and_its_logits() -> None:
    anatomy, size = Model(BUILDS["llama"]()).anatomy, CalibrationSize(samples=64, seq_len=16, batch_size=4)
    weights = {"quantizer": "twn"}
    plain = METHODS.build("qat", weights=weights, batch_size=8)
    taught = METHODS.build("qat", weights=weights, batch_size=8, teacher="source", losses=[{"loss": "logits"}])
    memory = [method.estimate_resources(anatomy, size, None).memory for method in (plain, taught)]
    teacher = 4 * sum(parameter.numel() for parameter in anatomy.network.parameters())
    assert memory[1] - memory[0] == teacher + 4 * (4 * 8 * 16 * 99), "four copies of the logits"
