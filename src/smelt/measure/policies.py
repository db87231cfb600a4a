"""Evaluate policies: the return of episodes in an environment, or the agreement with an expert's actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from smelt.data.batches import check_positive
from smelt.data.demonstrations import Demonstrations, demonstration_batches
from smelt.data.environments import Environment
from smelt.errors import DataError
from smelt.measure.eval_result import EvalResult
from smelt.measure.logits import eval_mode
from smelt.models.model import Model
from smelt.progress import NullProgress, Progress


def evaluate_episodes(
    model: Model, data: Environment, *, limit: int | None = None, progress: Progress = NullProgress()  # noqa: B008
) -> EvalResult:  # fmt: skip
    """Compute the mean return of episodes in which the policy takes its most likely actions, or the first `limit`."""
    check_positive(limit=limit)
    episodes = len(data) if limit is None else min(limit, len(data))
    environments = [data.make() for _ in range(episodes)]
    try:
        check_environment(model, environments[0], data.name)
        returns = run_episodes(model, environments, progress)
    finally:
        for environment in environments:
            environment.close()
    return EvalResult(
        metric="return", value=float(returns.mean()), higher_is_better=True, data=data.name, items=returns,
        predictions=returns.copy(), settings={"episodes": episodes},
    )  # fmt: skip


def run_episodes(model: Model, environments: list[Any], progress: Progress = NullProgress()) -> np.ndarray:  # noqa: B008
    """Return the return of one episode in each environment, [environments]; they run in step, as one batch."""
    states = np.stack([environment.reset(seed=seed)[0] for seed, environment in enumerate(environments)])
    returns, running = np.zeros(len(environments)), np.ones(len(environments), dtype=bool)
    space, steps = environments[0].action_space, environments[0].spec.max_episode_steps
    with eval_mode(model.network):
        for _ in progress.track(range(steps), "episodes"):
            actions = policy_actions(model, states, space)
            for index in np.flatnonzero(running):
                states[index], reward, terminated, truncated, _ = environments[index].step(actions[index])
                returns[index] += float(reward)
                running[index] = not (terminated or truncated)
            if not running.any():
                break
    return returns


def policy_actions(model: Model, states: np.ndarray, space: Any) -> np.ndarray:
    """Return the actions for states [batch, features]: the most likely ones, or the means within their bounds."""
    observations = torch.from_numpy(states.astype(np.float32)).to(model.device)
    outputs = model.network(observations=observations).logits.float().cpu().numpy()
    if model.network.config.action_space == "discrete":
        actions: np.ndarray = outputs.argmax(axis=-1) + space.start
        return actions
    return np.clip(outputs, space.low, space.high)


def check_environment(model: Model, environment: Any, name: str) -> None:
    """Raise unless the policy reads the observations of an environment and gives its actions."""
    config: Any = model.network.config
    observed = environment.observation_space.shape
    if observed != (config.observation_size,):
        raise DataError(
            f"the observations of {name} have the shape {list(observed or ())}, but the policy reads vectors of "
            f"{config.observation_size} numbers."
        )
    space = environment.action_space
    discrete = hasattr(space, "n") and hasattr(space, "start")
    expected = ("discrete", int(space.n)) if discrete else ("continuous", *(space.shape or ()))
    if expected != (config.action_space, config.action_size):
        raise DataError(
            f"the actions of {name} are {space}, but the policy has {config.action_size} {config.action_space} ones."
        )


def evaluate_demonstrations(
    model: Model,
    data: Demonstrations,
    *,
    metric: str | None = None,
    batch_size: int = 1024,
    limit: int | None = None,
    progress: Progress = NullProgress(),  # noqa: B008
) -> EvalResult:
    """Compute the accuracy of discrete actions, or the mean squared error of continuous ones, against the expert's."""
    check_positive(limit=limit)
    supported = demonstrations_metric(data)
    if metric not in (None, supported):
        raise DataError(f"The metric '{metric}' does not fit {data.action_space} actions: use {supported}.")
    check_demonstrations(model, data)
    data = data if limit is None else data.take(range(min(limit, len(data))))
    batches = demonstration_batches(data, samples=None, batch_size=batch_size, seed=0)
    with eval_mode(model.network):
        rows = [
            model.network(observations=batch["observations"].to(model.device)).logits.float().cpu()
            for batch in progress.track(batches, "evaluation")
        ]
    outputs = torch.cat(rows).numpy()
    settings = {"items": len(data)}
    if data.action_space == "continuous":
        errors = np.square(outputs - data.actions).mean(axis=-1, dtype=np.float64)
        return EvalResult(
            supported, float(errors.mean()), False, data.name, errors, predictions=errors.copy(), settings=settings
        )
    predictions = outputs.argmax(axis=-1)
    correct = (predictions == data.actions).astype(np.float64)
    return EvalResult(
        supported, float(correct.mean()), True, data.name, correct, predictions=predictions, labels=data.actions,
        logits=outputs, settings=settings,
    )  # fmt: skip


def demonstrations_metric(data: Demonstrations) -> str:
    return "accuracy" if data.action_space == "discrete" else "mse"


def check_demonstrations(model: Model, data: Demonstrations) -> None:
    """Raise unless demonstrations have the policy's observations and actions."""
    config: Any = model.network.config
    features = data.observations.shape[1]
    if features != config.observation_size:
        raise DataError(
            f"{data.name} has observations of {features} numbers, but the policy reads {config.observation_size}."
        )
    if data.action_space != config.action_space:
        raise DataError(
            f"{data.name} has {data.action_space} actions, but those of the policy are {config.action_space}."
        )
    discrete = data.action_space == "discrete"
    size = int(data.actions.max()) + 1 if discrete else data.actions.shape[1]
    if size > config.action_size or (not discrete and size != config.action_size):
        raise DataError(
            f"{data.name} has {size} {'actions' if discrete else 'numbers per action'}, but the policy has "
            f"{config.action_size}."
        )
