"""Intermediate outputs: losses against formulas written by hand, Teacher Intervention, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional as F

from smelt.compression.base import METHODS, Batch, MethodContext
from smelt.compression.distillation.fake_quantize import init_activations, prepare
from smelt.compression.distillation.intermediates import (
    CONTEXTS,
    HIDDEN_STATES,
    INTERVENTIONS,
    MAPS,
    OUTPUTS,
    PROJECTIONS,
    SCORES,
    ObservedNetwork,
    block_paths,
)
from smelt.compression.distillation.losses import LOSSES
from smelt.compression.distillation.quantizers.minmax import MinMaxActivations
from smelt.compression.distillation.quantizers.twn import Twn
from smelt.compression.distillation.student import Student
from smelt.compression.distillation.teachers import DenseTeacher
from smelt.errors import DataError, ModelError, RecipeError
from smelt.models.anatomy_builder import anatomy_of
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from tests.tiny import BUILDS, ENCODER, build_network, inputs, labeled

ALL = (HIDDEN_STATES, SCORES, MAPS, CONTEXTS, PROJECTIONS, OUTPUTS)
FEATURES = ("hidden-states", "attention-output", "attention-map", "attention-score")
LINEAR = [layer.path for block in anatomy_of(BUILDS["bert"]()).blocks for part in block.parts
          for layer in (*part.input_projections, part.output)]  # fmt: skip


def student_of(
    dense: Any, losses: tuple[str, ...] = FEATURES, *, quantized: bool = True, dropout: float = 0.0
) -> Student:
    """Return a ternary copy of a network in training mode, with the network as its teacher."""
    network, blocks = copy.deepcopy(dense), block_paths(anatomy_of(dense))
    if quantized:
        prepare(network, dict.fromkeys(LINEAR, Twn()), MinMaxActivations(8, signed=True))
        init_activations(network, labeled("bert"))
    for module in network.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    terms = tuple(LOSSES.build(name) for name in losses)
    student = Student(network, terms, DenseTeacher(copy.deepcopy(dense), ALL))
    student.observed = ObservedNetwork(network, blocks, ALL)
    return student.train()


def observe(network: Any, name: str) -> dict[str, list[Tensor]]:
    observed = ObservedNetwork(network, block_paths(anatomy_of(network)), ALL)
    intermediates = observed(inputs(name)).intermediates
    observed.close()
    return intermediates


def test_intermediates_of_bert_are_those_of_transformers() -> None:
    network, batch = BUILDS["bert"](), inputs("bert")
    ours = observe(network, "bert")
    assert network.config._attn_implementation == "sdpa", "restored"
    layer, captured = network.bert.encoder.layer[1], {}
    layer.attention.register_forward_hook(lambda _, __, out: captured.update(attention=out[0]))
    layer.attention.output.dense.register_forward_hook(
        lambda _, args, out: captured.update(context=args[0], projection=out)
    )
    network.set_attn_implementation("eager")
    theirs = network(**batch, output_attentions=True, output_hidden_states=True)
    assert all(map(torch.allclose, ours[HIDDEN_STATES], theirs.hidden_states)) and len(ours[HIDDEN_STATES]) == 4
    assert all(map(torch.allclose, ours[MAPS], theirs.attentions)) and len(ours[MAPS]) == 3
    assert torch.allclose(ours[SCORES][1].softmax(-1), theirs.attentions[1], atol=1e-6)
    assert torch.allclose(ours[CONTEXTS][1].flatten(2), captured["context"], atol=1e-6)
    assert torch.allclose(ours[PROJECTIONS][1], captured["projection"], atol=1e-6)
    assert torch.allclose(ours[OUTPUTS][1], captured["attention"], atol=1e-6)


@pytest.mark.parametrize("name", ["vit", "llama", "gpt2"])
def test_pre_norm_networks_are_observed_too(name: str) -> None:
    network, batch = BUILDS[name](), inputs(name)
    ours = observe(network, name)
    network.set_attn_implementation("eager")
    theirs = network(**batch, output_attentions=True, output_hidden_states=True)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours[MAPS], theirs.attentions, strict=True))
    before_last = ours[HIDDEN_STATES][:-1]  # transformers normalizes the last one
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(before_last, theirs.hidden_states[:-1], strict=True))
    residual = ours[HIDDEN_STATES][1] + ours[PROJECTIONS][1]
    assert torch.allclose(ours[OUTPUTS][1], residual, atol=1e-6), "the residual stream after attention"


@pytest.mark.parametrize("name", FEATURES)
def test_losses_follow_their_formulas(name: str) -> None:
    """One token pair after the other, as the published code loops; the first text has three padded tokens."""
    torch.manual_seed(0)
    batch, mask = inputs("bert"), inputs("bert")["attention_mask"]
    term = LOSSES.build(name)
    ours, theirs = (_random_intermediates(mask, seed)[term.intermediates[0]] for seed in (1, 2))
    student, teacher = (type("Out", (), {"intermediates": {term.intermediates[0]: each}})() for each in (ours, theirs))
    lengths, expected = mask.sum(-1).tolist(), 0.0
    for own, taught in zip(ours, theirs, strict=True):
        if name == "attention-map":
            for row, length in enumerate(lengths):
                for head in range(4):
                    p, q = (each[row, head, :length, :length].clamp(min=1e-8) for each in (taught, own))
                    expected += float((p * (p / q).log()).sum()) / length / (4 * len(lengths))
        elif name == "attention-score":
            parts = [(own - taught)[row, :, :length, :length].flatten() for row, length in enumerate(lengths)]
            expected += float(torch.cat(parts).square().mean())
        else:
            parts = [(own - taught)[row, :length].flatten() for row, length in enumerate(lengths)]
            expected += float(torch.cat(parts).square().mean())
    assert float(term.compute(student, teacher, batch)) == pytest.approx(expected, rel=1e-4)
    assert term.compute(student, teacher, {}).isfinite(), "images have no mask"


def _random_intermediates(mask: Tensor, seed: int) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(*mask.shape, 8, generator=generator) for _ in range(3)]
    minimum = torch.finfo(torch.float32).min
    scores = [torch.randn(len(mask), 4, mask.shape[1], mask.shape[1], generator=generator) for _ in range(2)]
    scores = [each + (1 - mask)[:, None, None, :] * minimum for each in scores]
    return {HIDDEN_STATES: hidden, OUTPUTS: hidden[:2], SCORES: scores, MAPS: [each.softmax(-1) for each in scores]}


@pytest.mark.parametrize("name", FEATURES)
def test_the_unquantized_student_has_no_loss_and_padding_no_influence(name: str) -> None:
    dense, batch = BUILDS["bert"](), labeled("bert")
    same = student_of(dense, (name,), quantized=False)
    assert float(same(**batch).loss.detach()) == pytest.approx(0, abs=1e-6)
    student = student_of(dense, (name,))
    loss = student(**batch).loss
    loss.backward()
    gradients = [student.network.get_submodule(path).layer.weight.grad for path in LINEAR[:2]]
    assert float(loss.detach()) > 1e-3 and all(
        gradient is not None and gradient.abs().sum() > 0 for gradient in gradients
    )
    longer = {key: F.pad(value, (0, 5), value=0) if value.dim() == 2 else value for key, value in batch.items()}
    assert float(student(**longer).loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-3)


def test_a_regression_learns_the_teachers_value() -> None:
    student, teacher = (type("Out", (), {"logits": torch.tensor([[x], [1.0]])})() for x in (3.0, 1.0))
    assert float(LOSSES.build("logits").compute(student, teacher, {})) == pytest.approx(2.0)


@pytest.mark.parametrize("mode", INTERVENTIONS)
def test_an_unquantized_student_with_intervention_is_the_teacher(mode: str) -> None:
    dense, batch = BUILDS["bert"](), labeled("bert")
    student = student_of(dense, quantized=False)
    student.intervention = mode
    assert torch.allclose(student(**batch).logits, dense(**batch).logits, atol=1e-6)


def test_intervention_brings_the_student_closer_the_later_it_happens() -> None:
    dense, batch = build_network(hf.BertForSequenceClassification, hf.BertConfig(**ENCODER)), labeled("bert")
    student = student_of(dense, ("hidden-states",))
    losses = {}
    for mode in (None, *INTERVENTIONS):
        student.intervention = mode
        losses[mode] = float(student(**batch).loss.detach())
    assert losses["output"] < losses["context"] < losses["map"] < losses[None]
    student.eval()
    student.intervention = "output"
    evaluated = student(**batch).logits
    student.intervention = None
    assert torch.equal(evaluated, student(**batch).logits), "the teacher takes no part in evaluation"


@pytest.mark.parametrize("mode", INTERVENTIONS)
def test_gradients_of_attention_stay_in_their_block(mode: str) -> None:
    student, batch = student_of(BUILDS["bert"](), ("attention-score",)), labeled("bert")
    own = student.observed(batch, mode, student._teacher[0].outputs(student, batch)).intermediates[SCORES]
    own[2].clamp(min=-100).square().sum().backward()
    weights = {path: student.network.get_submodule(path).layer.weight.grad for path in LINEAR}
    touched = {path for path, gradient in weights.items() if gradient is not None and gradient.abs().sum() > 0}
    assert touched == {f"bert.encoder.layer.2.attention.self.{name}" for name in ("query", "key")}


def test_map_intervention_trains_values_through_blocks_and_the_others_do_not() -> None:
    student, batch = student_of(BUILDS["bert"](), ("logits",)), labeled("bert")
    value = student.network.bert.encoder.layer[0].attention.self.value.layer.weight
    projection = student.network.bert.encoder.layer[0].attention.output.dense.layer.weight
    trained = {}
    for mode in INTERVENTIONS:
        student.zero_grad()
        student.intervention = mode
        student(**batch).loss.backward()
        assert all(parameter.grad is not None for parameter in student.parameters() if parameter.requires_grad), (
            "DDP waits for the gradient of every parameter"
        )
        trained[mode] = (bool(value.grad.abs().sum() > 0), bool(projection.grad.abs().sum() > 0))
    assert trained == {"map": (True, True), "context": (False, True), "output": (False, False)}
    taught = student._teacher[0].outputs(student, batch)
    for mode in INTERVENTIONS:
        inside = student.observed(batch, mode, taught).intermediates
        gradient = torch.autograd.grad(inside[CONTEXTS][1].square().sum(), inside[HIDDEN_STATES][1], allow_unused=True)[
            0
        ]
        assert (gradient is not None) == (mode == "map"), "only maps let values train the block before"


def test_activation_checkpointing_recomputes_the_intervention() -> None:
    dense, batch = BUILDS["bert"](), labeled("bert")
    gradients = []
    for checkpointing in (False, True):
        student = student_of(dense, dropout=0.1)
        if checkpointing:
            student.network.gradient_checkpointing_enable({"use_reentrant": False})
        student.intervention = "map"
        torch.manual_seed(0)
        student(**batch).loss.backward()
        gradients.append({name: p.grad for name, p in student.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.allclose(gradients[0][name], gradients[1][name], atol=1e-6) for name in gradients[0])


def test_schedules() -> None:
    def phases(mode: str) -> list[str | None]:
        method = METHODS.build("teacher-intervention", mode=mode, intervention_steps=12)
        return [method.intervention(step) for step in range(14)]

    assert phases("gradual") == ["output"] * 2 + ["context"] * 2 + ["map"] * 8 + [None] * 2
    assert phases("inverted") == ["map"] * 4 + ["context"] * 4 + ["output"] * 4 + [None] * 2
    assert phases("context") == ["context"] * 12 + [None] * 2
    assert set(phases("stochastic")[:12]) == set(INTERVENTIONS) and phases("stochastic")[12:] == [None] * 2


def texts(count: int = 48) -> list[Batch]:
    """Return texts of two classes, by their first token, with padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 99, (count, 12), generator=generator)
    labels = torch.randint(2, (count,), generator=generator)
    ids[:, 0] = 3 + labels
    lengths = torch.randint(4, 13, (count, 1), generator=generator)
    mask = (torch.arange(12) < lengths).long()
    return [{"input_ids": ids, "attention_mask": mask, "labels": labels}]


def apply(name: str, network: Any, batches: list[Batch], folder: Path, **settings: Any) -> tuple[Model, dict[str, Any]]:
    model = Model(network, source="tiny")
    settings = {"weights": {"quantizer": "twn"}, "batch_size": 8, "epochs": 3, **settings}
    method = METHODS.build(name, **settings)
    return model, method.apply(model, MethodContext(batches=batches, folder=folder, seed=1))


def test_training_with_intervention_is_packed_exactly(tmp_path: Path) -> None:
    """The teacher is in the loop for most steps, and the packed network computes what the trained one does alone."""
    model, facts = apply("teacher-intervention", BUILDS["bert"](), texts(), tmp_path, intervention_steps=12)
    assert facts["conversion_error"] < 1e-5 and facts["steps"] == 18
    assert len(quantized_layers(model.network)) == 18 and model.network.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.network.modules())
    losses = [{"loss": name} for name in ("logits", "hidden-states", "attention-score", "attention-output")]
    inputs_8_bits = {"quantizer": "minmax", "bits": 8, "signed": True}
    settings = {"teacher": "source", "losses": losses, "inputs": inputs_8_bits}
    _, plain = apply("qat", BUILDS["bert"](), texts(), tmp_path, **settings)
    assert facts["loss_curve"][0][1] < plain["loss_curve"][0][1], "the teacher's attention is closer to the teacher"


def test_features_of_convolutions(tmp_path: Path) -> None:
    """Hidden states exist in any network with blocks."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        "pixel_values": torch.randn(24, 3, 32, 32, generator=generator),
        "labels": torch.randint(5, (24,), generator=generator),
    }
    settings = {"teacher": "source", "losses": [{"loss": "hidden-states"}], "optimizer": {"lr": 3e-3}, "epochs": 5}
    _, facts = apply("qat", BUILDS["resnet"](), [batch], tmp_path, **settings)
    assert facts["loss_curve"][-1][1] < 0.8 * facts["loss_curve"][0][1]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    bert, attention = BUILDS["bert"](), {"teacher": "source", "losses": [{"loss": "attention-map"}]}
    images = [{"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.zeros(8).long()}]
    with pytest.raises(ModelError, match=r"of this resnet network has no attention .* use the loss hidden-states"):
        apply("qat", BUILDS["resnet"](), images, tmp_path, **attention)
    with pytest.raises(ModelError, match="computes the attention of mpnet in a way of its own"):
        apply("qat", BUILDS["mpnet"](), texts(), tmp_path, **attention)
    with pytest.raises(ModelError, match=r"gpt2 computes queries, keys and values in one layer.*mode: context"):
        apply("teacher-intervention", BUILDS["gpt2"](), texts(), tmp_path)
    with pytest.raises(DataError, match="the data has none"):
        apply("teacher-intervention", bert, [{k: v for k, v in texts()[0].items() if k != "labels"}], tmp_path)
    with pytest.raises(RecipeError, match=r"trains for 6 steps and the teacher intervenes in the first 60"):
        apply("teacher-intervention", BUILDS["bert"](), texts(), tmp_path, epochs=1)
    with pytest.raises(RecipeError, match="groups of 128 do not divide"):  # as in every training
        coarse = {"quantizer": "minmax", "weight_format": "int4/128"}
        METHODS.build("teacher-intervention", weights=coarse).check(anatomy_of(BUILDS["bert"]()))
    with pytest.raises(RecipeError, match="mode of teacher-intervention must be one of gradual"):
        METHODS.build("teacher-intervention", mode="late")
    with pytest.raises(RecipeError, match="needs a teacher"):
        METHODS.build("teacher-intervention", teacher=None, losses=[{"loss": "labels"}])
    with pytest.raises(RecipeError, match="the loss attention-map needs a teacher"):
        METHODS.build("qat", losses=[{"loss": "attention-map"}])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("loss", "change", "sentence"),
    [
        ("hidden-states", {"hidden_size": 16}, r"4 of \[12, 16\] and 4 of \[12, 32\]; take a teacher of the same"),
        ("hidden-states", {"num_hidden_layers": 2}, r"3 of \[12, 32\] and 4 of \[12, 32\]"),
        ("attention-map", {"num_attention_heads": 2}, r"attention maps .* 3 of \[2, 12, 12\] and 3 of \[4, 12, 12\]"),
        ("logits", {"num_labels": 3}, r"the teacher's logits have other shapes .* 1 of \[3\] and 1 of \[2\]"),
    ],
)
def test_another_architecture_cannot_teach(loss: str, change: dict[str, int], sentence: str, tmp_path: Path) -> None:
    config = hf.BertConfig(**{**ENCODER, "num_labels": 2, **change})
    build_network(hf.BertForSequenceClassification, config).save_pretrained(tmp_path / "teacher")
    settings = {"losses": [{"loss": loss}], "teacher": str(tmp_path / "teacher")}
    with pytest.raises(ModelError, match=sentence):
        apply("qat", BUILDS["bert"](), texts(), tmp_path, **settings)
    assert not list(tmp_path.glob("*-training"))
