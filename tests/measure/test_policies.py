"""Policies in environments and on demonstrations: returns by hand, fixed episodes, gates, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from smelt import Recipe, compress
from smelt.compression.recipe.inputs import check_data
from smelt.data import Demonstrations, Environment, TextData
from smelt.errors import DataError, QualityGateError
from smelt.measure.evaluate import evaluate, expected_metric, measure_quality
from smelt.measure.gate import gate, parse_margins
from smelt.measure.paired import compare
from smelt.measure.policies import policy_actions, run_episodes
from smelt.models.mlp_policy import MlpPolicy, MlpPolicyConfig
from smelt.models.model import Model
from smelt.progress import NullProgress

QUIET = NullProgress()


def linear_policy(weight: list[list[float]], action_space: str) -> Model:
    """Return a policy whose outputs are a matrix times the observation: ReLU(x) - ReLU(-x) = x."""
    matrix = torch.tensor(weight)
    actions, features = matrix.shape
    config = MlpPolicyConfig(features, actions, action_space, hidden_size=2 * features, num_hidden_layers=1)
    network = MlpPolicy(config)
    identity = torch.eye(features)
    with torch.no_grad():
        network.input.weight.copy_(torch.cat([identity, -identity]))
        network.layers[0].dense.weight.copy_(torch.eye(2 * features))
        network.head.weight.copy_(torch.cat([matrix, -matrix], dim=1))
        for layer in (network.input, network.layers[0].dense, network.head):
            layer.bias.zero_()
    return Model(network.eval(), source="linear")


def balancing() -> Model:
    """Push the cart to the side to which the pole falls."""
    return linear_policy([[-0.1, -0.3, -1.0, -1.0], [0.1, 0.3, 1.0, 1.0]], "discrete")


def pushing_right() -> Model:
    model = linear_policy([[0.0] * 4] * 2, "discrete")
    model.network.head.bias.data.copy_(torch.tensor([0.0, 1.0]))
    return model


def test_returns_are_those_of_single_episodes() -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    expected = []
    for seed in range(3):
        environment = gymnasium.make("CartPole-v1")
        environment.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            _, reward, terminated, truncated, _ = environment.step(1)
            total, done = total + reward, terminated or truncated
        expected.append(total)
    result = evaluate(pushing_right(), Environment("CartPole-v1", 3), progress=QUIET)
    assert result.items.tolist() == expected and result.value == np.mean(expected)
    assert result.metric == "return" and result.higher_is_better and result.settings == {"episodes": 3}
    assert evaluate(pushing_right(), Environment("CartPole-v1"), limit=2, progress=QUIET).items.tolist() == expected[:2]


class Countdown:
    """An environment whose episode n ends after n + 1 steps, and which must not be stepped after that."""

    action_space = SimpleNamespace(start=0)
    spec = SimpleNamespace(max_episode_steps=10)

    def reset(self, *, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        self.left = seed + 1
        return np.zeros(4), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.left > 0 and action == 1
        self.left -= 1
        return np.zeros(4), 1.0, self.left == 0, False, {}


def test_an_episode_ends_while_others_go_on() -> None:
    assert run_episodes(pushing_right(), [Countdown() for _ in range(3)]).tolist() == [1.0, 2.0, 3.0]


def test_actions_are_clipped_to_their_bounds() -> None:
    space = SimpleNamespace(low=np.array([-2.0, -1.0]), high=np.array([2.0, 1.0]))
    model = linear_policy([[1.0, 0.0], [0.0, 1.0]], "continuous")
    with torch.no_grad():
        actions = policy_actions(model, np.array([[3.0, -3.0], [0.5, 0.25]]), space)
    assert actions.tolist() == [[2.0, -1.0], [0.5, 0.25]]


def test_a_better_policy_balances_until_the_limit_and_passes_a_gate() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    data = Environment("CartPole-v1", 4)
    good, bad = (
        measure_quality(model, data, context=1, limit=None, batch_size=8) for model in (balancing(), pushing_right())
    )
    assert good.items.tolist() == [500.0] * 4 and bad.value < 20
    margin = parse_margins(["5%"]).of(expected_metric(data))
    assert gate(good, good, margin).passed and not gate(bad, good, margin).passed
    verdict = gate(bad, good, margin)
    assert verdict.drop == pytest.approx((500 - bad.value) / 500) and "return on gym:CartPole-v1@4" in verdict.sentence
    assert compare(bad, good).verdict == "worse" and compare(bad, good).difference == bad.value - 500


def test_the_margin_of_a_negative_return_is_relative_to_its_magnitude() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    idle = linear_policy([[0.0, 0.0, 0.0]], "continuous")
    spinning = linear_policy([[0.0, 0.0, 100.0]], "continuous")  # beyond the bounds of the torque, so clipped
    base, new = (
        evaluate(model, Environment("Pendulum-v1", 6), progress=QUIET) for model in (idle, spinning)
    )  # fmt: skip
    assert new.value < base.value < 0
    verdict = gate(new, base, parse_margins(["return=1%"]).of("return"))
    assert verdict.verdict == "fail" and verdict.drop == pytest.approx((base.value - new.value) / -base.value)
    assert gate(base, new, parse_margins(["1%"]).of("return")).passed


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("Pendulum-v1", r"observations of gym:Pendulum-v1@1 have the shape \[3\], but the policy reads vectors of 4"),
        ("Acrobot-v1", r"have the shape \[6\]"),
        ("FrozenLake-v1", r"have the shape \[\]"),
    ],
)
def test_an_environment_of_other_observations_is_refused(environment: str, message: str) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    with pytest.raises(DataError, match=message):
        evaluate(balancing(), Environment(environment, 1), progress=QUIET)


def test_an_environment_of_other_actions_is_refused() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    three = linear_policy([[0.0] * 4] * 3, "discrete")
    with pytest.raises(
        DataError, match=r"actions of gym:CartPole-v1@1 are Discrete\(2\), but the policy has 3 discrete"
    ):
        evaluate(three, Environment("CartPole-v1", 1), progress=QUIET)
    with pytest.raises(DataError, match="but the policy has 1 continuous ones"):
        evaluate(linear_policy([[0.0] * 4], "continuous"), Environment("CartPole-v1", 1), progress=QUIET)


def test_demonstrations_have_an_accuracy_or_a_squared_error() -> None:
    states = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    model = balancing()
    expert = model.network(torch.from_numpy(states)).logits.argmax(-1).numpy()
    expert[:5] ^= 1
    result = evaluate(model, Demonstrations("steps", states, expert), batch_size=16, progress=QUIET)
    assert result.metric == "accuracy" and result.value == pytest.approx(0.9)
    assert evaluate(model, Demonstrations("steps", states, expert), limit=10, progress=QUIET).value == 0.5
    model = linear_policy([[1.0, 0.0], [0.0, 2.0]], "continuous")
    data = Demonstrations("steps", np.float32([[1, 1], [0, 3]]), np.float32([[1, 1], [2, 6]]))
    result = evaluate(model, data, progress=QUIET)
    assert result.metric == "mse" and not result.higher_is_better
    assert result.items.tolist() == [0.5, 2.0] and result.value == 1.25
    with pytest.raises(DataError, match="The metric 'accuracy' does not fit continuous actions: use mse"):
        evaluate(model, data, metric="accuracy", progress=QUIET)


def test_demonstrations_of_another_policy_are_refused() -> None:
    states, actions = np.zeros((4, 4), np.float32), np.array([0, 1, 2, 1])
    with pytest.raises(DataError, match="has observations of 3 numbers, but the policy reads 4"):
        evaluate(balancing(), Demonstrations("steps", states[:, :3], actions), progress=QUIET)
    with pytest.raises(DataError, match="steps has 3 actions, but the policy has 2"):
        evaluate(balancing(), Demonstrations("steps", states, actions), progress=QUIET)
    with pytest.raises(DataError, match="has continuous actions, but those of the policy are discrete"):
        evaluate(balancing(), Demonstrations("steps", states, states[:, :2]), progress=QUIET)
    with pytest.raises(DataError, match="is a model for policy: give an environment or demonstrations"):
        evaluate(balancing(), TextData("words", ("a b",)), progress=QUIET)


def test_a_policy_is_compressed_by_a_recipe_and_gated_by_its_return(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    model = balancing()
    model.network.save_pretrained(tmp_path / "policy")
    states = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
    actions = model.network(torch.from_numpy(states)).logits.argmax(-1).numpy()
    np.savez(tmp_path / "steps.npz", observations=states, actions=actions)
    content = {
        "data": {"source": str(tmp_path / "steps.npz"), "samples": 400},
        "evaluate": {"source": "gym:CartPole-v1@4", "max_drop": "20%"},
        "steps": [{"method": "qail", "epochs": 4, "optimizer": {"name": "adamw", "lr": 0.003}}],
    }
    result = compress(str(tmp_path / "policy"), Recipe.parse(content), tmp_path / "small", progress=QUIET)
    assert result.record["quality"]["before"] == 500 and result.record["quality"]["gate"]["verdict"] == "pass"
    assert result.record["speed"][0]["name"] == "forward, batch 1, observations"
    held_out = check_data(Recipe.parse({**content, "evaluate": {}}), model)
    assert isinstance(held_out, Demonstrations) and len(held_out) == 80 and expected_metric(held_out) == "accuracy"
    with pytest.raises(DataError, match="qail needs demonstrations, and there are no default ones"):
        check_data(Recipe.parse({"steps": content["steps"]}), model)
    broken = {**content, "steps": [{"method": "rtn", "bits": 2, "group_size": -1, "input_activations": "int2"}]}
    with pytest.raises(QualityGateError, match="the quality gate failed: return on gym:CartPole-v1@4"):
        compress(str(tmp_path / "policy"), Recipe.parse(broken), tmp_path / "broken", progress=QUIET)
