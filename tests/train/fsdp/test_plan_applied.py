"""Plans on real ranks: the training result of plain FSDP2, and events in the predicted order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from smelt.errors import ConfigError
from smelt.train.fsdp.parallelize import apply_plan
from smelt.train.fsdp.plan import ClusterSpec, ModelProfile, ShardingPlan, ShardUnit
from smelt.train.fsdp.profile import estimate_layers, measure_collectives, profile_layers
from smelt.train.fsdp.search import search_plan
from smelt.train.fsdp.timeline import COMPUTE, ROOT, StepTimeline, predict_timeline
from smelt.train.fsdp.trace import measure_timeline
from smelt.train.gradients.comm import Comm
from tests.train.parallel import outcomes, run
from tests.train.synthetic import rank

CPU = torch.device("cpu")
PLANS = {
    "one by one": ShardingPlan(tuple(ShardUnit(place, place + 1, True) for place in range(5)), 1, 1),
    "far ahead": ShardingPlan(
        (ShardUnit(0, 1, True), ShardUnit(1, 3, True), ShardUnit(3, 4, True), ShardUnit(4, 5, False)), 2, 2
    ),
    "nothing ahead": ShardingPlan((ShardUnit(0, 2, True), ShardUnit(2, 4, False), ShardUnit(4, 5, True)), 0, 1),
    "together": ShardingPlan((ShardUnit(0, 5, False),), 1, 1),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 64), nn.Linear(64, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    """An embedding, blocks, a head, and optionally a trained scale outside any layer."""

    def __init__(self, tied: bool = False, scaled: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(24, 40, bias=False)
        self.scale = nn.Parameter(torch.ones(24)) if scaled else 1.0
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x * self.scale)
        return logits


class Work:
    """Return a function that runs forward and backward on one batch."""

    def __init__(self, network: nn.Module, number: int = 0) -> None:
        self._network = network
        generator = torch.Generator().manual_seed(10 * number + rank())
        self._tokens = torch.randint(40, (8, 6), generator=generator)

    def __call__(self) -> None:
        self._network.zero_grad()
        logits = self._network(self._tokens)
        cross_entropy(logits.flatten(0, 1), self._tokens.flatten()).backward()


def profile_network(network: nn.Module) -> ModelProfile:
    return profile_layers(network, Work(network), Comm(), CPU)


def train_sharded(plan: ShardingPlan | None) -> Any:
    torch.manual_seed(0)
    network = Network()
    mesh = init_device_mesh("cpu", (2,))
    if plan is None:
        for layer in (network.embed, *network.blocks, network.head):
            fully_shard(layer, mesh=mesh)
        fully_shard(network, mesh=mesh)
    else:
        apply_plan(plan, profile_network(network), network, mesh)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
    for number in range(5):
        Work(network, number)()
        optimizer.step()
    return torch.cat([parameter.detach().full_tensor().flatten() for parameter in network.parameters()]).numpy()


def train_and_trace(plan: ShardingPlan, scaled: bool) -> tuple[Any, StepTimeline, StepTimeline]:
    """Return the parameters after training and both timelines."""
    parameters = train_sharded(plan)
    network = Network(scaled=scaled)
    model = profile_network(network)
    gather, scatter = measure_collectives(Comm(), CPU)
    predicted = predict_timeline(model, plan, ClusterSpec(2, gather, scatter, 1e12, overlap=False))
    apply_plan(plan, model, network, init_device_mesh("cpu", (2,)))
    return parameters, predicted, measure_timeline(plan, model, network, Work(network), CPU)


def events(timeline: StepTimeline) -> list[tuple[str, int]]:
    """Drop the root's compute, and compare the final reduce-scatters as a set: the root's may come first."""
    order = [event for event in timeline.order if event[0] not in COMPUTE or event[1] != ROOT]
    return [*order[:-2], *sorted(order[-2:])]


def test_every_plan_trains_like_plain_fsdp_in_the_predicted_order() -> None:
    plain = run(2, train_sharded, None)[0]
    for name, plan in PLANS.items():
        for parameters, predicted, real in run(2, train_and_trace, plan, name != "together"):
            assert abs(parameters - plain).max() < 1e-6, name
            assert events(real) == events(predicted), name
            assert (("reduce-scatter", ROOT) in real.order) == (name != "together"), name
            assert all(event.end >= event.start >= 0 for event in real.events), name
            assert real.peak_memory is None and 0 < real.compute_seconds < real.seconds and real.exposed_seconds > 0


def measure_and_plan() -> tuple[dict[str, Any], ShardingPlan]:
    """Measure, then plan within memory, with no settings."""
    network = Network()
    model = profile_network(network)
    workers = Comm()
    gather, scatter = measure_collectives(workers, CPU)
    cluster = ClusterSpec(workers.world_size, gather, scatter, 1e9, overlap=False)
    result = search_plan(model, cluster)
    return model.to_json(), result.plan


def test_layers_are_detected_and_measured_equally_on_all_ranks() -> None:
    first, second = run(2, measure_and_plan)
    assert first == second
    model, plan = first
    assert [layer["name"] for layer in model["layers"]] == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [layer["bytes"] for layer in model["layers"]] == [3840, 12640, 12640, 12640, 3840]
    assert model["root"]["bytes"] == 96
    assert all(layer["forward"] > 0 and layer["backward"] > 0 for layer in model["layers"])
    tanh = 8 * 6 * 64 * 4
    assert tanh <= model["layers"][1]["activations"] <= 4 * tanh
    assert not any(
        unit.reshard_after_forward for unit in plan.units
    )  # nothing is gathered twice where memory allows it


def estimate_network() -> dict[str, Any]:
    network = Network(tied=True)
    return estimate_layers(network, Work(network), 1e6, Comm(), CPU).to_json()


def test_times_are_flops_over_speed_and_tied_layers_stay_with_the_root() -> None:
    model = run(2, estimate_network)[0]
    assert [layer["name"] for layer in model["layers"]] == ["blocks.0", "blocks.1", "blocks.2"]
    products = 2 * 8 * 6 * 24 * 64 * 2  # two matrices, forward
    assert model["layers"][1]["forward"] == pytest.approx(products / 1e6)
    assert model["layers"][1]["backward"] == pytest.approx(2 * products / 1e6)
    assert model["root"]["bytes"] == 3840 + 96 and model["root"]["forward"] > 0


def apply_invalid_plan(what: str) -> None:
    network, mesh = Network(), init_device_mesh("cpu", (2,))
    model = profile_network(network)
    if what == "other":
        layers = (replace(model.layers[0], name="gone"), *model.layers[1:])
        apply_plan(PLANS["together"], replace(model, layers=layers), network, mesh)
    if what == "unsharded":
        measure_timeline(PLANS["together"], model, network, Work(network), CPU)
    apply_plan(PLANS["together"], model, network, mesh)
    apply_plan(PLANS["together"], model, network, mesh)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("other", "the network has no layer 'gone'"),
        ("unsharded", "apply a plan to it first"),
        ("twice", "was applied to"),
    ],
)
def test_invalid_models_raise_one_sentence(what: str, words: str) -> None:
    for _, error in outcomes(2, apply_invalid_plan, what):
        assert error.startswith("ConfigError") and words in error


def test_a_single_rank_measures_layers_but_no_link() -> None:
    assert not distributed.is_initialized()
    network, tokens = Network(), torch.zeros(2, 3, dtype=torch.long)
    model = profile_layers(network, lambda: network(tokens).sum().backward(), Comm(), CPU)
    assert model.bytes == sum(parameter.numel() * 4 for parameter in network.parameters())
    with pytest.raises(ConfigError, match="start several with torchrun"):
        measure_collectives(Comm(), CPU)
