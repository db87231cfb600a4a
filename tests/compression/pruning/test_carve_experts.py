"""Carving chooses what each domain needs; the router learns which expert has the largest neurons; a small model on two
domains loses less than with one pruned feed-forward of the same active width.
"""

from __future__ import annotations

import copy
import itertools
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from smelt.compression.base import CalibrationSize, MethodContext
from smelt.compression.calibration.domain_neurons import jaccard, measure_importance, read_domain, top_mask
from smelt.compression.methods import METHODS
from smelt.compression.pruning.carve_experts import (
    CarveExperts,
    choose_channels,
    group_domains,
    layer_target,
    router_targets,
)
from smelt.data.batches import text_batches
from smelt.data.text import TextData
from smelt.errors import DataError, ModelError, RecipeError
from smelt.measure.cost import active_parameters, block_parameters, count_parameters
from smelt.models.carved_experts import carve, carved_layers, carved_routes_of, describe_carving
from smelt.models.expert_router import ExpertRouter, RouterConfig
from smelt.models.model import Model
from tests.character_tokenizer import character_tokenizer
from tests.tiny import BUILDS
from tests.trained import sentences, trained_llama

QUICK: dict[str, Any] = {
    "method": "carve-experts", "samples": 16, "seq_len": 32, "router_epochs": 5, "epochs": 1,
    "optimizer": {"lr": 1e-3}, "batch_size": 4,
}  # fmt: skip


def counting(count: int) -> str:
    return " ".join(f"{i * 7 % 97} plus {i * 13 % 89} is {i * 7 % 97 + i * 13 % 89};" for i in range(count))


@lru_cache(maxsize=1)
def texts() -> tuple[str, str]:
    return sentences(600, seed=1), counting(600)


def model() -> Model:
    return Model(copy.deepcopy(trained_llama("".join(texts()), 80)), character_tokenizer())


@pytest.fixture
def domains(tmp_path: Path) -> list[str]:
    for name, text in zip(("words", "sums"), texts(), strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    return [str(tmp_path / "words.txt"), str(tmp_path / "sums.txt")]


def batches(text: str, samples: int = 8, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    return text_batches(
        TextData("text", (text,)), character_tokenizer(), samples=samples, length=32, batch_size=2, seed=seed
    )


def importance_of(trained: Model, text: str) -> list[torch.Tensor]:
    importance, _ = measure_importance(trained.anatomy, [batches(text)], 0.5, list)
    return importance[0]


def test_importance_is_the_mean_absolute_input_of_the_down_projection() -> None:
    trained = model()
    found = importance_of(trained, texts()[0])
    for layer, part in enumerate(part for part in trained.anatomy.parts if part.kind == "ffn_channels"):
        seen: list[torch.Tensor] = []
        hook = part.output.module.register_forward_hook(lambda _, args, out, seen=seen: seen.append(args[0].abs()))
        with torch.no_grad():
            for batch in batches(texts()[0]):
                trained.network(input_ids=batch["input_ids"])
        hook.remove()
        assert torch.allclose(found[layer], torch.cat(seen).double().mean((0, 1)), rtol=1e-5)


def test_channels_are_the_largest_of_each_domain_and_those_of_all_are_shared() -> None:
    generator = np.random.Generator(np.random.PCG64(0))
    importance = [[torch.tensor(generator.random(9)) for _ in range(2)] for _ in range(3)]
    for layer, channels in enumerate(choose_channels(importance, [[0], [1], [2]], 0.5)):
        kept = [{*channels.shared, *own} for own in channels.experts]
        for values, chosen in zip((domain[layer] for domain in importance), kept, strict=True):
            assert len(chosen) == 4  # int(0.5 * 9)
            rest = set(range(9)) - chosen
            assert min(values[list(chosen)]) > max(values[list(rest)])
        assert set(channels.shared) == set.intersection(*kept)
        assert all(not set(own) & set(channels.shared) for own in channels.experts)
        assert len({len(own) for own in channels.experts}) == 1


def test_similar_domains_share_an_expert() -> None:
    """Of all ways to merge two of four domains, the one with the largest overlap of masks is chosen."""
    generator = np.random.Generator(np.random.PCG64(1))
    first, second = (torch.tensor(generator.random(40)) for _ in range(2))
    importance = [[first], [second], [first + 0.01 * second], [second + 0.01 * first]]
    assert group_domains(importance, 4, 0.5) == [[0], [1], [2], [3]]
    assert group_domains(importance, 2, 0.5) == [[0, 2], [1, 3]]
    masks = [top_mask(domain[0], 0.5) for domain in importance]
    best = max(itertools.combinations(range(4), 2), key=lambda pair: jaccard(masks[pair[0]], masks[pair[1]]))
    (merged,) = [group for group in group_domains(importance, 3, 0.5) if len(group) == 2]
    assert tuple(merged) == best


def test_the_target_of_a_layer_by_hand() -> None:
    """Ten neurons, of which expert 0 has 0 to 4 and expert 1 has 5 to 9."""
    masks = torch.tensor([[1.0] * 5 + [0.0] * 5, [0.0] * 5 + [1.0] * 5])
    values = torch.tensor([[10.0, 9, 8, 1, 2, 7, 6, 3, 4, 5]])
    # Descending 10 9 8 7 6, and so the values of rank 4, 4, 3, 2, 1 are 6 6 7 8 9.
    marks = {10: 5, 9: 4, 8: 3, 7: 2}
    graded = [sum(marks.get(int(value), 0) for value in half) / 15 for half in values[0].split(5)]
    assert graded == [12 / 15, 2 / 15]
    scores = torch.tensor([5 * (graded[0] - graded[1]), 5 * (graded[1] - graded[0])])
    expected = 0.75 * torch.tensor([0.75, 0.25]) + 0.25 * scores.softmax(0)
    assert torch.allclose(layer_target(values, masks, int(masks[0].sum()))[0], expected)


def test_the_mean_of_the_targets_gives_the_published_loss() -> None:
    """0.75 cross-entropy with the smoothed label and 0.25 with the soft target, averaged over layers."""
    trained = model()
    data = [batches(text, samples=2) for text in texts()]
    importance = [importance_of(trained, text) for text in texts()]
    channels = choose_channels(importance, [[0], [1]], 0.5)
    targets = router_targets(trained.anatomy, data, channels, list)[0][0]
    logits = torch.randn(2, 32, 2, generator=torch.Generator().manual_seed(0))
    losses = []
    parts = [part for part in trained.anatomy.parts if part.kind == "ffn_channels"]
    for part, layer in zip(parts, channels, strict=True):
        seen: list[torch.Tensor] = []
        hook = part.output.module.register_forward_hook(lambda _, args, out, seen=seen: seen.append(args[0].abs()))
        with torch.no_grad():
            trained.network(input_ids=data[0][0]["input_ids"])
        hook.remove()
        hidden, size = seen[0].flatten(0, 1), len(layer.experts[0])
        ordered = hidden.sort(dim=1, descending=True).values
        q = sum(
            (hidden > ordered[:, rank, None]).float()
            for rank in (size - 1, 4 * size // 5, 3 * size // 5, 2 * size // 5, size // 5)
        )
        d = torch.stack([q[:, list(own)].sum(1) / (3 * size) for own in layer.experts], dim=1)
        d = 10 * (d - d.mean(1, keepdim=True))
        flat = logits.flatten(0, 1)
        hard = F.cross_entropy(flat, d.argmax(1), label_smoothing=0.5)
        losses.append(0.75 * hard + 0.25 * F.cross_entropy(flat, d.softmax(1)))
    ours = F.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
    assert torch.allclose(ours, torch.stack(losses).mean(), rtol=1e-4)


def test_carving_a_trained_model(domains: list[str]) -> None:
    trained = model()
    before = block_parameters(trained.anatomy)
    facts = METHODS.build({**QUICK, "domains": domains}).apply(trained, MethodContext(seed=0))
    assert describe_carving(trained.network) is not None
    assert facts["experts"] == {"expert 0": [domains[0]], "expert 1": [domains[1]]}
    assert all(s + e == 24 for s, e in zip(facts["shared_channels"], facts["expert_channels"], strict=True))
    assert [len(layer.experts) for layer in carved_layers(trained.network)] == [2, 2, 2]
    assert facts["active_parameters"] == active_parameters(trained.anatomy) < before
    assert facts["block_parameters_after"] == block_parameters(trained.anatomy)
    assert 0.5 < facts["mask_stability"] < 1
    words, sums = (facts["domain_shares"][name] for name in domains)
    assert sum(words) == pytest.approx(1, abs=1e-3) and words[0] > sums[0] + 0.2
    router = carved_routes_of(trained.network).router
    assert not any(parameter.requires_grad for parameter in router.parameters())


def test_the_router_does_not_change_with_the_experts(domains: list[str]) -> None:
    """The same seed with and without training of the experts gives the same router, other experts."""
    networks = []
    for epochs in (0, 1):
        trained = model()
        METHODS.build({**QUICK, "domains": domains, "epochs": epochs}).apply(trained, MethodContext(seed=0))
        networks.append(trained.network)
    first, second = (network.state_dict() for network in networks)
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert {name for name in first if name.startswith("expert_router.")} <= same
    assert not any("experts" in name for name in same)


def test_a_teacher_and_another_seed(domains: list[str]) -> None:
    trained = model()
    settings = {**QUICK, "domains": domains, "teacher": "source", "losses": [{"loss": "logits"}]}
    facts = METHODS.build(settings).apply(trained, MethodContext(seed=3))
    assert facts["final_loss"] < 5


def test_routing_loses_less_than_one_pruned_feed_forward() -> None:
    """Without training: half of the channels for each domain by oracle routing, against the same half for both."""
    trained = model()
    held_out = [batches(text, seed=5) for text in (sentences(200, seed=9), counting(900)[9000:])]
    importance = [importance_of(trained, text) for text in texts()]
    apart, together = (choose_channels(importance, groups, 0.35) for groups in ([[0], [1]], [[0, 1], [0, 1]]))

    def loss(channels: Any, expert: int) -> float:
        network = copy.deepcopy(trained.network)
        router = ExpertRouter(RouterConfig(network.config.vocab_size, 2, 8))
        with torch.no_grad():  # always the same expert
            for parameter in router.parameters():
                parameter.zero_()
            router.embed_tokens.weight.fill_(1.0)
            router.norm.fill_(1.0)
            router.head.weight[expert] = 1.0
            carve(Model(network).anatomy, channels, router)
            outputs = [network(input_ids=b["input_ids"], labels=b["labels"]) for b in held_out[expert]]
        return sum(float(output.loss) for output in outputs) / len(outputs)

    assert loss(apart, 0) + loss(apart, 1) < loss(together, 0) + loss(together, 1)


def test_columns_of_tables_are_domains(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "why", "answer": "because"}))
    assert read_domain(f"{tmp_path}/a.jsonl:answer").documents == ("because",)
    (tmp_path / "b.txt").write_text("plain")
    assert read_domain(f"{tmp_path}/b.txt").documents == ("plain",)
    with pytest.raises(DataError):
        read_domain(f"{tmp_path}/c.txt:answer")


def test_the_plan_counts_all_texts_and_the_largest_result() -> None:
    anatomy, size = model().anatomy, CalibrationSize(samples=8, seq_len=32, batch_size=2)
    few, many = (
        METHODS.build({**QUICK, "domains": ["a", "b"], "samples": samples}).estimate_resources(anatomy, size, None)
        for samples in (8, 24)
    )
    assert many.passes == pytest.approx(3 * few.passes) == pytest.approx(3 * 2 * (2 + 3))
    method = METHODS.build({**QUICK, "domains": ["a", "b"], "width": 0.75, "router_width": 16})
    vocabulary = anatomy.network.config.vocab_size
    assert method.added_parameters(anatomy) == 3 * 3 * 32 * 24 + vocabulary * 16 + 6 * 16**2
    before = count_parameters(anatomy.network)
    method.reshape(anatomy, {})
    assert count_parameters(anatomy.network) - before == pytest.approx(method.added_parameters(anatomy), rel=0.02)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"experts": 3, "domains": ["a.txt", "b.txt"]}, "2 domains are too few for 3 experts"),
        ({"width": 1.0}, "would carve nothing"),
        ({"width": 0.0}, "width of carve-experts"),
        ({"experts": 1}, "experts of carve-experts"),
        ({"losses": []}, "at least one term"),
        ({"losses": [{"loss": "logits"}]}, "needs a teacher"),
        ({"teacher": "other"}, "the model before this step"),
        ({"precision": "fp8"}, "precision"),
        ({"router_window": 0}, "router_window"),
        ({"samples": 1}, "samples"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        METHODS.build({"method": "carve-experts", **settings})


def test_models_and_texts_that_cannot_work_are_refused(domains: list[str]) -> None:
    with pytest.raises(DataError, match="needs at least two"):
        METHODS.build(QUICK).check(model().anatomy)
    with pytest.raises(DataError, match="missing"):  # before the model is read
        METHODS.build({**QUICK, "domains": [domains[0], "/missing.txt"]}).check(model().anatomy)
    method = METHODS.build({**QUICK, "domains": domains})
    with pytest.raises(ModelError, match="with a gate"):
        method.check(Model(BUILDS["gpt2"]()).anatomy)
    with pytest.raises(ModelError, match="no tokenizer"):
        method.apply(Model(model().network), MethodContext())
    with pytest.raises(RecipeError, match="leaves no channel"):
        METHODS.build({**QUICK, "domains": domains, "width": 0.01}).check(model().anatomy)
    with pytest.raises(RecipeError, match="must be even"):
        METHODS.build({**QUICK, "domains": domains, "router_width": 5}).check(model().anatomy)


def test_domains_that_need_the_same_channels_are_refused(domains: list[str]) -> None:
    with pytest.raises(DataError, match="nothing to route"):
        METHODS.build({**QUICK, "domains": [domains[0]] * 2}).apply(model(), MethodContext())


def test_a_router_that_sends_everything_to_one_expert(domains: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the experts train. With targets that always name one expert, so does a trained router."""

    def one_sided(anatomy: Any, data: Any, channels: Any, track: Any) -> Any:
        certain = torch.tensor([0.0, 1.0])
        return [[certain.expand(*batch["input_ids"].shape, 2).clone() for batch in part] for part in data]

    monkeypatch.setattr("smelt.compression.pruning.carve_experts.router_targets", one_sided)
    monkeypatch.setattr(CarveExperts, "train_experts", lambda *_: pytest.fail("the experts were trained"))
    with pytest.raises(DataError, match="sends every token to one of 2 experts"):
        settings = {**QUICK, "domains": domains, "router_epochs": 12, "router_optimizer": {"lr": 0.03}}
        METHODS.build(settings).apply(model(), MethodContext())


def test_a_trained_router_is_kept_when_a_run_is_interrupted(domains: list[str], tmp_path: Path) -> None:
    from smelt.compression.checkpoint import Checkpoint

    work = tmp_path / "work"
    work.mkdir()
    method = METHODS.build({**QUICK, "domains": domains})
    first, second = model(), model()
    facts = method.apply(first, MethodContext(checkpoint=Checkpoint(work)))
    again = method.apply(second, MethodContext(checkpoint=Checkpoint(work)))
    assert again["router_loss_curve"] == facts["router_loss_curve"]
    states = [each.network.state_dict() for each in (first, second)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
