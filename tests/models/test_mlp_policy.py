"""Policies as models: saved without pickles, loaded, and checked like any other model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from smelt.errors import ModelError
from smelt.measure.latency import latency
from smelt.models.inputs import random_inputs
from smelt.models.load import load
from smelt.models.mlp_policy import ACTION_SPACES, MlpPolicy, MlpPolicyConfig


def policy(action_space: str = "discrete", **sizes: int) -> MlpPolicy:
    torch.manual_seed(0)
    network = MlpPolicy(MlpPolicyConfig(action_size=3, action_space=action_space, hidden_size=16, **sizes))
    network.observation_mean.fill_(0.5)
    network.observation_std.fill_(2.0)
    return network.eval()


@pytest.mark.parametrize("action_space", ACTION_SPACES)
def test_a_policy_is_saved_and_loaded_without_pickles(action_space: str, tmp_path: Path) -> None:
    network = policy(action_space)
    network.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    model = load(tmp_path)
    observations = random_inputs(network)["observations"]
    assert model.task == "policy"
    assert torch.equal(model.network(observations).logits, network(observations).logits)
    assert [layer.path for block in model.anatomy.blocks for layer in block.other_layers] == [
        "layers.0.dense",
        "layers.1.dense",
    ]
    assert latency(model, repeats=2).length == 1


def test_observations_are_normalized() -> None:
    network = policy()
    plain = policy()
    plain.observation_mean.zero_()
    plain.observation_std.fill_(1.0)
    observations = torch.randn(5, 4)
    torch.testing.assert_close(network(observations).logits, plain((observations - 0.5) / 2).logits)


def test_the_loss_is_the_negative_log_likelihood_of_the_expert() -> None:
    observations, actions = torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    output = policy()(observations, actions)
    torch.testing.assert_close(output.loss, -output.logits.log_softmax(-1)[range(5), actions].mean())
    target = torch.randn(5, 3)
    output = policy("continuous")(observations, target)
    gaussian = torch.distributions.Normal(output.logits, 1.0).log_prob(target).sum(-1).mean()
    constant = 1.5 * torch.log(torch.tensor(2 * torch.pi))
    torch.testing.assert_close(output.loss, -gaussian - constant)


def test_another_action_space_is_refused(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "action_space": "hybrid"}))
    with pytest.raises(ModelError, match="'hybrid': expected discrete or continuous"):
        load(tmp_path)
