"""Fisher weights: gradients of the divergence by another path and by differences; masks, storage, estimate, errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from smelt.compression.base import CalibrationSize, MethodContext
from smelt.compression.calibration.gradients import gradient_bytes
from smelt.compression.checkpoint import Checkpoint
from smelt.compression.quantization import brecq
from smelt.compression.quantization.brecq import Brecq
from smelt.compression.quantization.output_gradients import FisherWeights
from smelt.errors import ModelError, RecipeError
from smelt.models.mlp_policy import MlpPolicy, MlpPolicyConfig
from smelt.models.model import Model
from tests.compression.quantization.test_base import same
from tests.compression.quantization.test_brecq import W2A4, batches, codes, quantized
from tests.tiny import BUILDS, ENCODER, build_network

FISHER = {**W2A4, "weighting": "fisher"}


class Recorder:
    """The measured weights and the losses of a run with Fisher weighting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured: list[tuple[int, list[Tensor], list[Tensor]]] = []  # block, its outputs, their weights
        # Output, target, mask and weights of every loss.
        self.losses: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
        measure, loss = FisherWeights.measure, brecq.reconstruction_loss

        def noted_measure(weights: FisherWeights, output: Any) -> None:
            measure(weights, output)
            with torch.no_grad():
                outputs = [output(batch).clone() for batch in range(4)]
            self.measured.append((weights._index, outputs, [weights[batch] for batch in range(4)]))

        def noted_loss(output: Tensor, target: Tensor, mask: Tensor | None, weights: Tensor | None = None) -> Tensor:
            self.losses.append((output.detach().clone(), target, mask, weights))
            return loss(output, target, mask, weights)

        monkeypatch.setattr(FisherWeights, "measure", noted_measure)
        monkeypatch.setattr(brecq, "reconstruction_loss", noted_loss)


def divergence(model: Model, batch: dict[str, Tensor], index: int, hidden: Tensor) -> Tensor:
    """Return the summed KL divergence from the prediction of a network if the output of a block is replaced."""

    def replaced(_: Any, args: Any, output: Any) -> Any:
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    expected = model.network(**batch).logits.detach()
    handle = model.anatomy.blocks[index].module.register_forward_hook(replaced)
    logits = model.network(**batch).logits
    handle.remove()
    kept = batch["attention_mask"].bool() if logits.dim() == 3 else torch.ones(len(logits), dtype=torch.bool)
    p, q = expected[kept].softmax(-1), logits[kept].softmax(-1)
    return (p * (p.log() - q.log())).sum()


@pytest.mark.parametrize("name", ["resnet", "resnet-bottleneck", "vit", "bert", "gpt2", "llama"])
def test_weights_are_squared_gradients_of_the_divergence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, data = Recorder(monkeypatch), batches(name)
    if name == "llama":  # predictions at padding do not count
        data[1]["attention_mask"][2, 6:] = 0
    settings: dict[str, Any] = {**FISHER, "iterations": 1, "activation_iterations": 0}
    Brecq(**settings).apply(Model(BUILDS[name]()), MethodContext(batches=data))
    original = Model(BUILDS[name]().double())
    assert [index for index, _, _ in recorder.measured] == list(range(len(original.anatomy.blocks)))
    for index, outputs, weights in recorder.measured:
        expected, unpadded = [], []
        for batch, output in zip(data, outputs, strict=True):
            precise = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
            leaf = output.double().requires_grad_()
            (gradient,) = torch.autograd.grad(divergence(original, precise, index, leaf), leaf)
            expected.append(gradient.square())
            mask = batch.get("attention_mask")
            unpadded.append(expected[-1] if mask is None else expected[-1][mask.bool()])
        mean = torch.cat([squares.flatten() for squares in unpadded]).mean()
        for weight, squares in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.double(), squares / mean, rtol=1e-3, atol=1e-3)


def test_the_gradient_is_the_slope_of_the_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """By central differences, of the elements that count most and of some that count less."""
    recorder = Recorder(monkeypatch)
    quantized({**FISHER, "iterations": 1, "activation_iterations": 0})
    original, batch = Model(BUILDS["resnet"]().double()), {"pixel_values": batches()[2]["pixel_values"].double()}
    for index, outputs, weights in recorder.measured:
        hidden, order = outputs[2].double().contiguous(), weights[2].flatten().argsort(descending=True)
        slopes = []
        for element in (picked := order[[0, 1, 5, 50]]):
            step = torch.zeros_like(hidden)
            step.view(-1)[element] = 1e-4
            with torch.no_grad():
                up, down = (divergence(original, batch, index, hidden + sign * step) for sign in (1, -1))
            slopes.append(float(up - down) / 2e-4)
        ratios = weights[2].flatten()[picked] / weights[2].flatten()[order[0]]
        assert ratios.tolist() == pytest.approx([(slope / slopes[0]) ** 2 for slope in slopes], rel=1e-2)


def test_the_loss_multiplies_squared_errors_by_the_weights() -> None:
    output, target, weights = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5), torch.rand(2, 3, 4, 5)
    expected = sum(
        float(weights[i, c, y, x]) * (float(output[i, c, y, x]) - float(target[i, c, y, x])) ** 2
        for i in range(2) for c in range(3) for y in range(4) for x in range(5)
    ) / (2 * 4 * 5)  # fmt: skip
    assert brecq.reconstruction_loss(output, target, None, weights).item() == pytest.approx(expected, rel=1e-5)
    tokens, wanted, mask = torch.randn(1, 3, 6), torch.randn(1, 3, 6), torch.tensor([[True, True, False]])
    factors = torch.rand(1, 3, 6)
    expected = float((factors * (tokens - wanted) ** 2)[0, :2].sum()) / 2
    assert brecq.reconstruction_loss(tokens, wanted, mask, factors).item() == pytest.approx(expected, rel=1e-5)


def test_every_update_is_weighted_and_the_facts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are measured again, with quantized activations, before the scales are learned."""
    recorder = Recorder(monkeypatch)
    _, facts = quantized(FISHER)
    assert [index for index, _, _ in recorder.measured] == [0, 0, 1, 1, 2, 2, 3, 3]
    blocks, per_block = 4, 4 + 8 + 4 + 4  # errors before, updates of the rounding and of the scales, errors after
    assert len(recorder.losses) == blocks * per_block
    for block in range(blocks):
        losses = recorder.losses[block * per_block : (block + 1) * per_block]
        weights = [weight for *_, weight in losses]
        assert weights[:4] == weights[-4:] == [None] * 4
        phases = recorder.measured[2 * block : 2 * block + 2]
        for updates, (_, _, measured) in zip((weights[4:12], weights[12:16]), phases, strict=True):
            assert all(w is not None and any(torch.equal(w, m) for m in measured) for w in updates)
        assert not torch.equal(torch.cat(phases[0][2]), torch.cat(phases[1][2]))
    errors = [layer["block_error"] for layer in facts["layers"].values() if "block_error" in layer]
    plain = quantized({**W2A4, "iterations": 0, "activation_iterations": 0})[1]["layers"].values()
    nearest = next(layer["block_error"]["nearest"] for layer in plain if "block_error" in layer)
    assert errors[0]["nearest"] == pytest.approx(nearest, rel=1e-6)


def test_the_first_weights_are_those_of_the_block_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    quantized({**FISHER, "qdrop": 0.5, "iterations": 1})
    nearest = [output for output, *_ in recorder.losses[:4]]
    index, outputs, _ = recorder.measured[0]
    assert index == 0 and all(torch.equal(a, b) for a, b in zip(outputs, nearest, strict=True))


def test_gradients_on_disk_and_a_resumed_run_give_the_same_bits(tmp_path: Path) -> None:
    whole, _ = quantized(FISHER, checkpoint=Checkpoint(tmp_path / "work"))
    stored, _ = quantized(FISHER, memory_limit=1, folder=tmp_path)
    assert same(whole, stored)
    for left in (tmp_path / "work").glob("block-[123].*"):
        left.unlink()
    again, _ = quantized(FISHER, checkpoint=Checkpoint(tmp_path / "work"))
    assert same(whole, again)


def test_weights_are_one_if_no_element_changes_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of zeros predicts the same whatever it reads."""
    networks = []
    for weighting in ("none", "fisher"):
        model = Model(BUILDS["resnet"]())
        torch.nn.init.zeros_(model.network.classifier[1].weight)
        settings: dict[str, Any] = {**FISHER, "weighting": weighting}
        Brecq(**settings).apply(model, MethodContext(batches=batches()))
        networks.append(model)
    assert all(torch.equal(codes(networks[0])[path], mine) for path, mine in codes(networks[1]).items())


def test_the_plan_counts_gradients_and_the_passes_behind_each_block() -> None:
    anatomy, size = Model(BUILDS["resnet"]()).anatomy, CalibrationSize(64, 50, 8)
    settings: dict[str, Any] = {"iterations": 80, "input_activations": "int4"}

    def estimate(**changes: Any) -> Any:
        return Brecq(**{**settings, **changes}).estimate_resources(anatomy, size, None)

    plain, fisher = estimate(), estimate(weighting="fisher")
    joint, joint_fisher = (estimate(qdrop=0.5, weighting=weighting) for weighting in ("none", "fisher"))
    assert fisher.passes - plain.passes == 2 * (joint_fisher.passes - joint.passes) == 2 * 5 * 3 / 2
    store = estimate().memory - Brecq(iterations=80).estimate_resources(anatomy, size, None).memory
    assert fisher.memory - plain.memory >= store
    assert fisher.memory > gradient_bytes(anatomy, 8, 50, checkpointing=True)
    untrained = estimate(weighting="fisher", iterations=0, activation_iterations=0)
    assert untrained.passes == estimate(iterations=0, activation_iterations=0).passes


def test_networks_without_classes_are_refused() -> None:
    bert = transformers.BertConfig(**ENCODER)
    regression = copy.deepcopy(bert)
    regression.num_labels = 1
    several = transformers.BertConfig(**ENCODER, problem_type="multi_label_classification")
    policy = MlpPolicyConfig(observation_size=3, action_size=2, hidden_size=16)
    policy.action_space = "continuous"
    for network in (
        build_network(transformers.BertModel, bert),
        build_network(transformers.BertForSequenceClassification, regression),
        build_network(transformers.BertForSequenceClassification, several),
        build_network(MlpPolicy, policy),
    ):
        Brecq(bits=4).check(Model(network).anatomy)
        with pytest.raises(ModelError, match=r"compares predictions of classes or tokens.* use `weighting: none`"):
            Brecq(bits=4, weighting="fisher").check(Model(network).anatomy)
    policy.action_space = "discrete"
    Brecq(bits=4, weighting="fisher").check(Model(build_network(MlpPolicy, policy)).anatomy)
    with pytest.raises(RecipeError, match="weighting of brecq must be one of none, fisher"):
        Brecq(weighting="hessian")  # type: ignore[arg-type]
