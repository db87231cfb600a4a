"""QDPO: its loss, its pairs, their roles, resuming to the bit, and what it refuses."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smelt.compression.base import METHODS, Batch, MethodContext
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.distillation.losses import IGNORED
from smelt.compression.distillation.qdpo import (
    PreferenceStudent,
    Qdpo,
    answer_log_probs,
    common_prefix,
    preference_loss,
    preference_pairs,
)
from smelt.errors import DataError, ModelError, RecipeError
from smelt.models import generation
from smelt.models.model import Model
from smelt.models.quantized import quantized_layers
from tests.compression.distillation.test_qat import Interrupted
from tests.tiny import BUILDS
from tests.trained import character_model

SETTINGS = {
    "weights": {"quantizer": "minmax", "weight_format": "int2-asym/16"},
    "max_new_tokens": 8,
    "batch_size": 4,
    "optimizer": {"lr": 1e-3},
    "epochs": 3,
    "checkpoint_every": 2,
}


def prompts(count: int = 24) -> list[Batch]:
    """Return prompts of 3 to 10 characters, padded, without labels."""
    tokens = character_model().tokenizer("the dog likes the cat. the bird sees the child. the cat follows the dog.")
    ids, batches = tokens["input_ids"], []
    for start in range(0, count, 6):
        lengths = [3 + (start + row) % 8 for row in range(6)]
        rows = [ids[start + row : start + row + length] for row, length in enumerate(lengths)]
        batches.append({
            "input_ids": torch.tensor([row + [0] * (10 - len(row)) for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (10 - len(row)) for row in rows]),
        })  # fmt: skip
    return batches


def train(folder: Path, **more: Any) -> tuple[Model, dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    model = character_model("tiny")
    context = MethodContext(batches=prompts(), folder=folder, seed=1, checkpoint=Checkpoint(folder / "work"), **more)
    return model, METHODS.build("qdpo", **SETTINGS).apply(model, context)


def test_the_loss_is_that_of_dpo() -> None:
    log_probs = torch.tensor([[-3.0, -5.0], [-2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-2.5, -4.0], [-2.0, -3.0]], dtype=torch.float64)
    margins = [0.1 * ((-3 + 2.5) - (-5 + 4)), 0.1 * ((-2 + 2) - (-1 + 3))]
    expected = sum(math.log(1 + math.exp(-margin)) for margin in margins) / 2
    assert float(preference_loss(log_probs, reference, 0.1).detach()) == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda p: preference_loss(p, reference, 0.1), log_probs)
    assert float(preference_loss(reference, reference, 0.1)) == pytest.approx(math.log(2), rel=1e-12)
    better = preference_loss(torch.tensor([[-1.0, -9.0]]), torch.tensor([[-5.0, -5.0]]), 1.0)
    assert float(better) < 0.01, "the chosen answer comes first"


def test_log_probabilities_are_those_of_the_labels_only() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 7), torch.tensor([[IGNORED, IGNORED, 3, 1, IGNORED], [IGNORED, 2, 6, 0, 4]])
    expected = [
        sum(float(logits[row, n].log_softmax(-1)[token]) for n, token in enumerate(labels[row, 1:]) if token >= 0)
        for row in range(2)
    ]
    assert answer_log_probs(logits, labels).tolist() == pytest.approx(expected, rel=1e-5)


def test_the_gradient_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    network = BUILDS["llama"]().double()
    pairs = preference_pairs([[5, 6, 7], [8, 9]], [[10, 11, 12], [13]], [[10, 14], [15, 16, 17]])
    batch = {**pairs, "reference": torch.tensor([[-9.0, -8.0], [-7.0, -12.0]])}
    student, parameter = PreferenceStudent(network, 0.5), network.model.layers[1].mlp.up_proj.weight

    def loss() -> Tensor:
        # Its norms compute in float32, so that the steps of the differences cannot be tiny.
        labels, logits = batch["labels"].flatten(0, 1)[:, 1:], network(**student.inputs(batch)).logits[:, :-1]
        picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        chosen, rejected = ((picked * (labels >= 0)).sum(-1).view(2, 2) - batch["reference"]).unbind(-1)
        return -torch.nn.functional.logsigmoid(0.5 * (chosen - rejected)).mean()

    student(**batch).loss.backward()
    assert float(student(**batch).loss.detach()) == pytest.approx(float(loss().detach()), rel=1e-5)
    for row, column in ((0, 0), (3, 7), (20, 30)):
        with torch.no_grad():
            values = []
            for step in (1e-2, -1e-2):
                parameter[row, column] += step
                values.append(float(loss()))
                parameter[row, column] -= step
        assert float(parameter.grad[row, column]) == pytest.approx((values[0] - values[1]) / 2e-2, rel=1e-2, abs=1e-6)


def test_the_chosen_answer_has_a_loss_of_its_own() -> None:
    """As in TRL: the mean over the chosen answers' tokens of the batch, not over answers."""
    torch.manual_seed(0)
    network = BUILDS["llama"]()
    pairs = preference_pairs([[5, 6, 7], [8, 9]], [[10, 11, 12], [13]], [[10, 14], [15, 16, 17]])
    batch = {**pairs, "reference": torch.tensor([[-9.0, -8.0], [-7.0, -12.0]])}
    plain, with_loss = (float(PreferenceStudent(network, 0.5, alpha)(**batch).loss) for alpha in (0.0, 2.0))
    tokens = []
    for prompt, answer in (([5, 6, 7, 10], [11, 12]), ([8, 9], [13])):
        log_probs = network(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        tokens += [float(log_probs[len(prompt) - 1 + index, token]) for index, token in enumerate(answer)]
    assert with_loss - plain == pytest.approx(-2 * sum(tokens) / 3, rel=1e-4)


def test_pairs_begin_where_the_answers_differ() -> None:
    pairs = preference_pairs([[1, 2], [3], [4]], [[5, 6, 7], [8], [9, 9]], [[5, 8], [8], [9]])
    assert pairs["input_ids"].tolist()[0] == [[1, 2, 5, 6, 7], [1, 2, 5, 8, 0]], "equal answers are dropped"
    ignored = IGNORED
    assert pairs["labels"].tolist()[0] == [[ignored] * 3 + [6, 7], [ignored] * 3 + [8, ignored]]
    assert pairs["labels"].tolist()[1] == [[ignored, ignored, 9, ignored, ignored], [ignored] * 5]
    assert pairs["attention_mask"].sum(-1).tolist() == [[5, 4], [3, 2]] and pairs["first_flip"].tolist() == [1, 1]
    assert common_prefix([1, 2], [1, 2, 3]) == 2


def test_the_16_bit_model_is_chosen_and_the_quantized_one_rejected() -> None:
    model, context = character_model(), MethodContext(batches=prompts())
    method = METHODS.build("qdpo", **SETTINGS)
    assert isinstance(method, Qdpo)
    before = copy.deepcopy(model.network.state_dict())
    pairs = method.make_pairs(model, context)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.network.state_dict().items())
    assert 4 <= len(pairs["input_ids"]) <= 24
    with torch.no_grad():
        inputs = PreferenceStudent(model.network, 0.1).inputs(pairs)
        greedy = model.network(**inputs).logits.argmax(-1).unflatten(0, (-1, 2))
    labels = pairs["labels"][..., 1:]
    agrees = (greedy[..., :-1] == labels) | (labels == IGNORED)
    assert bool(agrees[:, 0].all()), "every chosen token is the most likely one of the 16-bit model"
    first = (labels != IGNORED).int().argmax(-1, keepdim=True)[:, 1]
    assert not bool(agrees[:, 1].gather(-1, first).any()), "the rejected answer differs at its first token"
    assert bool((pairs["reference"] < 0).all())
    free = METHODS.build("qdpo", **SETTINGS, reference_free=True)
    assert isinstance(free, Qdpo) and not bool(free.make_pairs(model, context)["reference"].any())


def test_it_learns_the_preference_and_packs_it(tmp_path: Path) -> None:
    model, facts = train(tmp_path / "run")
    assert facts["loss_curve"][0][1] == pytest.approx(math.log(2), abs=0.3)
    assert facts["loss_curve"][-1][1] < 0.8 * facts["loss_curve"][0][1]
    assert facts["conversion_error"] < 1e-5 and quantized_layers(model.network) and "validation_perplexity" not in facts
    assert facts["prompts"] == 24 >= facts["pairs"] > 3 and 0 <= facts["mean_first_flip"] < 8


def test_a_resumed_run_uses_the_pairs_that_were_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", progress=Interrupted(3))
    assert (tmp_path / "cut" / "work" / "pairs.safetensors").exists()
    monkeypatch.setattr(generation, "_continue", lambda *_: pytest.fail("the pairs were generated again"))
    resumed, _ = train(tmp_path / "cut")
    states = [each.network.state_dict() for each in (whole, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the data has none: name rows with a column prompt"):
        text = [{**batch, "labels": batch["input_ids"]} for batch in prompts()]
        METHODS.build("qdpo", **SETTINGS).apply(character_model(), MethodContext(batches=text, folder=tmp_path))
    with pytest.raises(ModelError, match="it needs a language model"):
        METHODS.build("qdpo", **SETTINGS).apply(Model(BUILDS["bert"]()), MethodContext(batches=prompts()))
    with pytest.raises(RecipeError, match="has a loss of its own"):
        METHODS.build("qdpo", losses=[{"loss": "labels"}])
    with pytest.raises(RecipeError, match="groups of 128 do not divide"):  # as in every training
        coarse = {"quantizer": "minmax", "weight_format": "int4/128"}
        METHODS.build("qdpo", **{**SETTINGS, "weights": coarse}).check(Model(BUILDS["llama"]()).anatomy)
    assert METHODS.build("qdpo").optimizer.lr == 1e-6, "small, as documented"
    with pytest.raises(DataError, match="leaves too few pairs"):
        exact = {**SETTINGS, "weights": {"quantizer": "minmax", "weight_format": "int8/16"}}
        few = MethodContext(batches=prompts()[:1], folder=tmp_path)
        METHODS.build("qdpo", **exact).apply(character_model(), few)
