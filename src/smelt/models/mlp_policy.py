"""Policies for control as multilayer perceptrons: from a vector of observations to an action.

A discrete policy returns a logit for each action, a continuous one the mean of a Gaussian of unit variance. Hidden
layers between the first and the last are the blocks of the network, so these are what Smelt quantizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import ModelOutput

MODEL_TYPE = "mlp_policy"
ACTION_SPACES = ("discrete", "continuous")


class MlpPolicyConfig(PreTrainedConfig):
    """The config of a policy."""

    model_type = MODEL_TYPE

    def __init__(
        self,
        observation_size: int = 4,
        action_size: int = 2,  # number of discrete actions, or length of a continuous one
        action_space: str = "discrete",
        hidden_size: int = 64,
        num_hidden_layers: int = 2,  # besides the first and the last layer
        hidden_act: str = "relu",
        **kwargs: object,
    ) -> None:
        if action_space not in ACTION_SPACES:
            raise ValueError(f"action_space is {action_space!r}: expected {' or '.join(ACTION_SPACES)}")
        self.observation_size, self.action_size, self.action_space = observation_size, action_size, action_space
        self.hidden_size, self.num_hidden_layers, self.hidden_act = hidden_size, num_hidden_layers, hidden_act
        super().__init__(**kwargs)


@dataclass
class PolicyOutput(ModelOutput):
    """The loss against expert actions, if these were given, and the policy's outputs [batch, action_size]."""

    loss: Tensor | None = None
    logits: Tensor | None = None  # of discrete actions; of a continuous one: its mean


class MlpPolicyLayer(nn.Module):
    """A hidden layer and its activation function."""

    def __init__(self, config: MlpPolicyConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        activated: Tensor = self.activation(self.dense(hidden_states))
        return activated


class MlpPolicy(PreTrainedModel):
    """A multilayer perceptron on normalized observations."""

    config_class = MlpPolicyConfig
    main_input_name = "observations"

    def __init__(self, config: MlpPolicyConfig) -> None:
        super().__init__(config)
        self.register_buffer("observation_mean", torch.zeros(config.observation_size))
        self.register_buffer("observation_std", torch.ones(config.observation_size))
        self.input = nn.Linear(config.observation_size, config.hidden_size)
        self.activation = ACT2FN[config.hidden_act]
        self.layers = nn.ModuleList(MlpPolicyLayer(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.action_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):  # PyTorch's own; transformers' deviation of 0.02 is for wide layers
            module.reset_parameters()

    def forward(self, observations: Tensor, labels: Tensor | None = None) -> PolicyOutput:
        """Compute the outputs for observations [batch, observation_size].

        With the expert's actions as `labels`, [batch] of a discrete policy or [batch, action_size], also the negative
        log-likelihood, of a Gaussian up to a constant.
        """
        normalized = (observations.to(self.observation_mean.dtype) - self.observation_mean) / self.observation_std
        hidden_states = self.activation(self.input(normalized))
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        outputs = self.head(hidden_states)
        if labels is None:
            return PolicyOutput(logits=outputs)
        if self.config.action_space == "discrete":
            return PolicyOutput(F.cross_entropy(outputs.float(), labels), outputs)
        return PolicyOutput(0.5 * (outputs.float() - labels).square().sum(-1).mean(), outputs)


def register() -> None:
    """Make transformers build these networks from their config."""
    AutoConfig.register(MODEL_TYPE, MlpPolicyConfig, exist_ok=True)
    AutoModel.register(MlpPolicyConfig, MlpPolicy, exist_ok=True)
