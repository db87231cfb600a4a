"""Quantization-aware training end to end: it learns, packs what it trained, resumes to the bit, and refuses early."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from smelt.compression.base import METHODS, Batch, Method, MethodContext
from smelt.compression.distillation.fake_quantize import fake_quantized_layers, init_activations, prepare
from smelt.compression.distillation.losses import Labels
from smelt.compression.distillation.quantizers.dorefa import Dorefa
from smelt.compression.distillation.quantizers.pact import Pact
from smelt.compression.distillation.quantizers.sawb import Sawb
from smelt.compression.distillation.samples import Samples, crop_and_flip
from smelt.compression.distillation.speq import StochasticPrecisionTeacher
from smelt.compression.distillation.student import Student
from smelt.compression.recipe.recipe import Recipe
from smelt.errors import DataError, DivergenceError, ModelError, RecipeError
from smelt.kernels.dispatch import use_backend
from smelt.models.artifact import load_artifact, save_artifact
from smelt.models.batch_norm import batch_statistics
from smelt.models.model import Model
from smelt.models.quantized import QuantizedConv, quantized_layers
from smelt.models.verify import verify
from smelt.progress import NullProgress
from tests.tiny import BUILDS, build_network, inputs

FAST = {"batch_size": 16, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "epochs": 6}
INT4 = {"weights": {"quantizer": "minmax", "weight_format": "int4/row"}}
W2A2 = {"weights": {"quantizer": "sawb"}, "inputs": {"quantizer": "pact", "alpha": 3.0, "penalty_weight": 0.002}}


def images(count: int = 128) -> list[Batch]:
    """Return images of five classes, each with a bright square elsewhere."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (count,), generator=generator)
    pixels = 0.3 * torch.randn(count, 3, 32, 32, generator=generator)
    for image, label in zip(pixels, labels.tolist(), strict=True):
        image[:, 6 * label : 6 * label + 6, 6 * label : 6 * label + 6] += 2
    return [{"pixel_values": p, "labels": y} for p, y in zip(pixels.split(32), labels.split(32), strict=True)]


def text(count: int = 64) -> list[Batch]:
    ids = torch.randint(3, 20, (count, 16), generator=torch.Generator().manual_seed(0)).repeat_interleave(2, dim=1)
    return [{"input_ids": part, "attention_mask": torch.ones_like(part), "labels": part} for part in ids.split(16)]


def train(
    method: Method, network: Any, batches: list[Batch], folder: Path, **more: Any
) -> tuple[Model, dict[str, Any]]:
    model = Model(network, source="tiny")
    return model, method.apply(model, MethodContext(batches=batches, folder=folder, seed=1, **more))


def accuracy(model: Model, batches: list[Batch]) -> float:
    with torch.no_grad():
        correct = [model.network(b["pixel_values"]).logits.argmax(-1) == b["labels"] for b in batches]
    return float(torch.cat(correct).float().mean())


@pytest.mark.parametrize("name", ["qat", "speq"])
def test_a_2_bit_network_learns_and_is_packed(name: str, tmp_path: Path) -> None:
    model, facts = train(METHODS.build(name, **W2A2, **FAST), BUILDS["resnet"](), images(), tmp_path)
    layers = quantized_layers(model.network)
    assert all(isinstance(layer, QuantizedConv) and layer.scheme.static for layer in layers.values())
    assert len(layers) == facts["layers_quantized"] > 8 and not fake_quantized_layers(model.network)
    assert facts["loss_curve"][0][1] > 2 * facts["loss_curve"][-1][1]
    assert accuracy(model, images()) > 0.85
    assert facts["conversion_error"] < 1e-5 and max(facts["learned_alpha"]) < 3.0, "the penalty lowers every level"
    assert len(next(iter(layers.values())).weight.unique()) <= 4
    assert facts["bytes_after"] < facts["bytes_before"] / 4
    (tmp_path / "saved").mkdir()
    save_artifact(model, tmp_path / "saved")
    verify(model, tmp_path / "saved")
    pixels = images()[0]["pixel_values"]
    reloaded = load_artifact(tmp_path / "saved")
    assert torch.equal(reloaded.network(pixels).logits, model.network(pixels).logits)


@pytest.mark.parametrize(("family", "bits"), [("vit", 4), ("resnet", 6), ("bert", 8)])
def test_a_packed_zero_point_is_the_trained_one(family: str, bits: int, tmp_path: Path) -> None:
    """The convolutions of the ResNet, too, which pad the outputs of a GELU with zeros."""
    generator = torch.Generator().manual_seed(0)
    batch = inputs(family, batch=16)
    batch["labels"] = torch.randint(2, (16,), generator=generator)
    settings = {"weights": {"quantizer": "minmax", "weight_format": "int8/row"}, "batch_size": 16, "epochs": 4}
    method = METHODS.build("qat", inputs={"quantizer": "pact2", "bits": bits}, **settings)
    network = BUILDS[family]()
    if family == "resnet":
        network.config.hidden_act = "gelu"
        network = build_network(type(network), network.config)
    model, facts = train(method, network, [batch] * 2, tmp_path)
    assert facts["conversion_error"] < 1e-5
    layers = quantized_layers(model.network).values()
    zeros = {int(layer.static_inputs[1]) for layer in layers if layer.static_inputs[1] is not None}
    assert len(zeros) > 1 and max(zeros) < 2**bits and len(layers) == facts["layers_quantized"]
    assert len(facts["learned_alpha_n"]) == len(facts["learned_alpha_p"]) == len(layers)
    (tmp_path / "saved").mkdir()
    save_artifact(model, tmp_path / "saved")
    batch.pop("labels")
    with torch.no_grad():
        logits = model.network(**batch).logits
        assert torch.equal(load_artifact(tmp_path / "saved").network(**batch).logits, logits)
        with use_backend("reference"):
            torch.testing.assert_close(model.network(**batch).logits, logits, rtol=1e-4, atol=1e-4)


def test_a_language_model_learns_ternary_weights_from_itself(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = BUILDS["llama"]()
    optimizer = torch.optim.AdamW(dense.parameters(), 3e-3)
    for _ in range(25):
        for batch in text():
            optimizer.zero_grad()
            dense(**batch).loss.backward()
            optimizer.step()
    settings = {"batch_size": 8, "optimizer": {"lr": 3e-3}, "epochs": 8}
    rounded, _ = train(METHODS.build("tsld", **{**settings, "epochs": 1e-3}), copy.deepcopy(dense), text(), tmp_path)
    trained, facts = train(METHODS.build("tsld", **settings), copy.deepcopy(dense), text(), tmp_path)
    losses = [sum(float(each.network(**batch).loss.detach()) for batch in text()) / 4 for each in (rounded, trained)]
    assert losses[1] < 0.9 * losses[0] and facts["bits"] == 2
    assert len(quantized_layers(trained.network)) == 21


class Interrupted(NullProgress):
    """Raises after so many steps, as a killed process ends."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def track(self, items: Iterable[Any], description: str, total: int | None = None) -> Iterator[Any]:
        for index, item in enumerate(items):
            if index == self.steps:
                raise KeyboardInterrupt
            yield item


class Totals(NullProgress):
    """Records how many items are tracked."""

    def __init__(self) -> None:
        self.totals: list[int | None] = []

    def track(self, items: Iterable[Any], description: str, total: int | None = None) -> Iterator[Any]:
        self.totals.append(total)
        yield from items


class KillAtTheEnd(NullProgress):
    """Replaces the removal of folders once the training is done."""

    def __init__(self, patch: pytest.MonkeyPatch, kill: Any) -> None:
        self.patch, self.kill = patch, kill

    def track(self, items: Iterable[Any], description: str, total: int | None = None) -> Iterator[Any]:
        yield from items
        self.patch.setattr("smelt.compression.distillation.training_run.shutil.rmtree", self.kill)


def test_an_interrupted_run_resumes_to_the_bit(tmp_path: Path) -> None:
    method = METHODS.build("speq", **W2A2, **{**FAST, "epochs": 2}, augment=True, checkpoint_every=4)
    whole, _ = train(method, BUILDS["resnet"](), images(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(method, BUILDS["resnet"](), images(), tmp_path / "cut", progress=Interrupted(10))
    assert any((tmp_path / "cut").iterdir())
    progress = Totals()
    resumed, facts = train(method, BUILDS["resnet"](), images(), tmp_path / "cut", progress=progress)
    assert 8 in progress.totals, "the steps after the last checkpoint"
    states = [each.network.state_dict() for each in (whole, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert len(facts["loss_curve"]) == facts["steps"] == 16 and not any((tmp_path / "cut").iterdir())


def test_a_training_that_was_killed_at_its_first_or_last_write_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first record the folder has none, and while it is removed any file may be gone."""
    method = METHODS.build("qat", **INT4, epochs=0.25, batch_size=8, checkpoint_every=1)
    whole, facts = train(method, BUILDS["llama"](), text(), tmp_path / "whole")
    folder = tmp_path / "cut" / "training"
    folder.mkdir(parents=True)
    (folder / "run.jsonl").touch()

    def kill(path: Path, **_: Any) -> None:
        (path / "run.jsonl").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        train(method, BUILDS["llama"](), text(), tmp_path / "cut", progress=KillAtTheEnd(patch, kill))
    assert (folder / "checkpoints").exists()
    resumed, again = train(method, BUILDS["llama"](), text(), tmp_path / "cut")
    states = [each.network.state_dict() for each in (whole, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert again == facts and not folder.exists()


class Poisoned(NullProgress):
    """Makes a weight of one layer infinite after so many steps."""

    def __init__(self, network: Any, path: str, steps: int) -> None:
        self.network, self.path, self.steps = network, path, steps

    def track(self, items: Iterable[Any], description: str, total: int | None = None) -> Iterator[Any]:
        for index, item in enumerate(items):
            if index + 1 == self.steps:
                self.network.get_submodule(self.path).layer.weight.data[0, 0] = torch.inf
            yield item


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_loss_that_is_not_finite_names_its_layer_and_keeps_the_weights(tmp_path: Path, checkpointing: bool) -> None:
    network, path = BUILDS["llama"](), "model.layers.1.mlp.up_proj"
    method = METHODS.build("tsld", batch_size=8, gradient_checkpointing=checkpointing)
    with pytest.raises(DivergenceError, match=rf"the loss of step 2 is not finite \(it began in {path}\); lower the"):
        train(method, network, text(), tmp_path, progress=Poisoned(network, path, 2))
    assert (tmp_path / "training" / "checkpoints" / "step-2" / "model.safetensors").exists()


def test_the_best_checkpoint_is_kept_and_resumed(tmp_path: Path) -> None:
    """With a learning rate that is too large at the end, an earlier checkpoint does better on held-out samples."""
    settings = {**W2A2, **FAST, "epochs": 4, "checkpoint_every": 4,
                "optimizer": {"name": "sgd", "lr": 30.0}, "schedule": {"warmup_steps": 100}}  # fmt: skip
    best, facts = train(METHODS.build("qat", **settings), BUILDS["resnet"](), images(), tmp_path)
    last, ends = train(METHODS.build("qat", **settings, select="last"), BUILDS["resnet"](), images(), tmp_path)
    assert facts["selected_step"] < facts["steps"] == ends["selected_step"]
    assert facts["validation_accuracy"] > ends["validation_accuracy"]
    assert accuracy(best, images()) > accuracy(last, images())
    with pytest.raises(KeyboardInterrupt):
        stop = Interrupted(facts["selected_step"] + 5)
        train(METHODS.build("qat", **settings), BUILDS["resnet"](), images(), tmp_path, progress=stop)
    resumed, again = train(METHODS.build("qat", **settings), BUILDS["resnet"](), images(), tmp_path)
    assert again["selected_step"] == facts["selected_step"]
    states = [each.network.state_dict() for each in (best, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_gradient_checkpointing_changes_no_result(tmp_path: Path) -> None:
    networks = []
    for checkpointing in (False, True):
        method = METHODS.build("tsld", batch_size=8, gradient_checkpointing=checkpointing, epochs=0.5)
        torch.manual_seed(0)
        networks.append(train(method, BUILDS["llama"](), text(), tmp_path)[0].network)
    first, second = (network.state_dict() for network in networks)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["resnet", "llama"])
def test_the_loss_of_a_student_is_one_graph(name: str) -> None:
    """Each break would stop torch.compile from fusing the rounding of a layer."""
    torch.manual_seed(0)
    network, batch = BUILDS[name]().train(), (images(8) if name == "resnet" else text(8))[0]
    kinds, part = (nn.Conv2d, "encoder") if name == "resnet" else (nn.Linear, "layers")
    paths = [path for path, module in network.named_modules() if isinstance(module, kinds) and part in path]
    prepare(network, dict.fromkeys(paths, Sawb()), Pact(2) if name == "resnet" else None)
    init_activations(network, batch)
    student = Student(network, (Labels(),), None).train()
    explained = torch._dynamo.explain(lambda **inputs: student(**inputs).loss)(**batch)
    assert explained.graph_count == 1 and explained.graph_break_count == 0, explained.break_reasons


@pytest.mark.slow  # compiles C++
@pytest.mark.parametrize(
    ("method_name", "name", "num_graphs"), [("qat", "resnet", 1), ("speq", "resnet", 3), ("tsld", "llama", 2)]
)
def test_a_compiled_run_learns_the_same(method_name: str, name: str, num_graphs: int, tmp_path: Path) -> None:
    """The blocks of a transformer share a graph, and so do those of its teacher; that of SPEQ has one of its own."""
    torch._dynamo.reset()  # a network of the same code would take the graphs of an earlier test
    facts: list[dict[str, Any]] = []
    settings = {"method": method_name, **(W2A2 if name == "resnet" else {})}
    for compiled in (False, True):
        torch.manual_seed(0)
        counters.clear()
        method = METHODS.build({**settings, **FAST, "epochs": 1, "compile": compiled, "select": "last"})
        batches = images() if name == "resnet" else text()
        model, each = train(method, BUILDS[name](), batches, tmp_path)
        facts.append(each)
        assert all(module._compiled_call_impl is None for module in model.network.modules())
    trained = counters["stats"]["unique_graphs"]
    curves = [[loss for _, loss in each["loss_curve"]] for each in facts]
    assert curves[1] == pytest.approx(curves[0], rel=0.05) and facts[1]["conversion_error"] < 1e-5
    assert num_graphs <= trained <= 2 * num_graphs, "in training and in evaluation"


def test_clipping_levels_do_not_grow_with_the_scale_of_quantized_weights() -> None:
    """DoReFa's weights lose their scale, so running statistics say nothing about the activations of training."""
    torch.manual_seed(0)
    network = BUILDS["resnet"]()
    paths = [path for path, m in network.named_modules() if isinstance(m, nn.Conv2d) and "encoder" in path]
    prepare(network, dict.fromkeys(paths, Dorefa(2)), Pact(2))
    init_activations(network, images(32)[0])
    alphas = [float(layer.input_learned["alpha"].detach()) for layer in fake_quantized_layers(network).values()]
    assert max(alphas) < 10, alphas  # normalized activations
    assert not network.training


def test_speqs_teacher() -> None:
    """Without high precision it is the student; it changes neither running statistics nor bits."""
    torch.manual_seed(0)
    network = BUILDS["resnet"]().train()
    batch = images(32)[0]
    paths = [path for path, m in network.named_modules() if isinstance(m, nn.Conv2d) and "encoder" in path]
    prepare(network, dict.fromkeys(paths, Sawb()), Pact(2, alpha=2.0))
    init_activations(network, batch)
    before = copy.deepcopy(network.state_dict())
    student = Student(network, (), None)
    with torch.no_grad(), batch_statistics(network):
        own = network(**batch).logits
    with torch.no_grad():
        same = StochasticPrecisionTeacher(0.0, 8).outputs(student, batch).logits
        high = StochasticPrecisionTeacher(1.0, 8).outputs(student, batch).logits
        drawn = [StochasticPrecisionTeacher(0.5, 8).outputs(student, batch).logits for _ in range(2)]
    assert torch.equal(own, same) and not torch.equal(own, high) and not torch.equal(*drawn)
    running = {name: value for name, value in network.state_dict().items() if "num_batches" not in name}
    assert all(torch.equal(value, before[name]) for name, value in running.items())
    assert {layer.other_input_bits for layer in fake_quantized_layers(network).values()} == {None}


def test_samples_are_padded_split_and_augmented_repeatably() -> None:
    rows = [{"input_ids": torch.ones(2, 3).long(), "labels": torch.tensor([1, 0])},
            {"input_ids": torch.ones(2, 5).long(), "labels": torch.tensor([0, 1])}]  # fmt: skip
    samples = Samples.from_batches(rows, torch.device("cpu"), augment=False, seed=0)
    assert samples.tensors["input_ids"].shape == (4, 5) and samples.tensors["input_ids"].sum() == 16
    first, last = samples.split(0.25)
    assert (len(first), len(last)) == (3, 1)
    with pytest.raises(DataError, match="only images"):
        Samples.from_batches(rows, torch.device("cpu"), augment=True, seed=0)
    with pytest.raises(DataError, match="too few"):
        Samples({"labels": torch.ones(1)}).split(0.5)
    pixels = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8) + 1
    cropped = [crop_and_flip(pixels, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(cropped[0], cropped[1]) and not torch.equal(cropped[0], cropped[2])
    assert all(_is_crop(image, source) for image, source in zip(cropped[0], pixels, strict=True))


def test_batches_are_as_long_as_their_longest_text() -> None:
    lengths = torch.tensor([3, 9, 40, 17])
    mask = (torch.arange(40) < lengths[:, None]).long()
    ids = mask * torch.randint(3, 90, (4, 40), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 0, 1])
    samples = Samples({"input_ids": ids, "attention_mask": mask, "labels": labels})
    short, long = samples.batch(np.array([1, 0])), samples.batch(np.array([0, 2]))
    assert short["input_ids"].shape == (2, 16) and long["input_ids"].shape == (2, 40)
    assert torch.equal(short["input_ids"], ids[[1, 0], :16]) and short["labels"].tolist() == [1, 0]
    left = Samples({"input_ids": ids.flip(1), "attention_mask": mask.flip(1)})
    assert left.batch(np.array([0]))["input_ids"].shape == (1, 40), "padding before a text stays"


def _is_crop(image: Tensor, source: Tensor) -> bool:
    padded = F.pad(source, [4] * 4)
    windows = [padded[:, top : top + 8, left : left + 8] for top in range(9) for left in range(9)]
    return any(torch.equal(image, window) or torch.equal(image, window.flip(-1)) for window in windows)


def test_what_cannot_work_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="the loss logits needs a teacher"):
        METHODS.build("qat", losses=[{"loss": "logits"}])
    with pytest.raises(RecipeError, match="speq varies the precision"):
        METHODS.build("speq", inputs=None)
    with pytest.raises(
        RecipeError, match="groups of 128 do not divide; give `weights` groups of 32, 16 or a scale per row"
    ):
        train(METHODS.build("qat"), BUILDS["llama"](), text(), tmp_path)
    with pytest.raises(DataError, match="the data has none"):
        unlabeled = [{"pixel_values": batch["pixel_values"]} for batch in images()]
        train(METHODS.build("speq"), BUILDS["resnet"](), unlabeled, tmp_path)
    with pytest.raises(ModelError, match="it needs a language model"):
        train(METHODS.build("tsld"), BUILDS["resnet"](), images(), tmp_path)
    with pytest.raises(RecipeError, match="groups of 128 do not divide"):
        coarse = {"quantizer": "minmax", "weight_format": "int4/128"}
        train(METHODS.build("tsld", weights=coarse), BUILDS["llama"](), text(), tmp_path)
    with pytest.raises(DataError, match=r"negative values.* `signed: true`"):
        settings = {"weights": {"quantizer": "twn"}, "inputs": {"quantizer": "pact", "bits": 8}}
        train(METHODS.build("qat", **settings), BUILDS["llama"](), text(), tmp_path)
    with pytest.raises(ModelError, match="vocabulary"):
        BUILDS["gpt2"]().save_pretrained(tmp_path / "teacher")
        settings = {
            "weights": {"quantizer": "twn"},
            "losses": [{"loss": "logits"}],
            "teacher": str(tmp_path / "teacher"),
        }
        network = BUILDS["llama"]()
        network.config.vocab_size = 5
        METHODS.build("qat", **settings).check(Model(network).anatomy)
    assert not list(tmp_path.glob("training"))


def test_a_recipe_round_trips() -> None:
    step = {"method": "qat", "teacher": "source", "losses": [{"loss": "logits", "weight": 0.5}, {"loss": "labels"}],
            "weights": {"quantizer": "lsq", "weight_format": "int2/64"}, "inputs": {"quantizer": "lsq", "signed": True},
            "optimizer": {"name": "sgd", "lr": 0.1}}  # fmt: skip
    recipe = Recipe.parse({"steps": [step]})
    assert Recipe.parse(recipe.to_json()) == recipe and "quantizer: lsq" in recipe.to_yaml()
