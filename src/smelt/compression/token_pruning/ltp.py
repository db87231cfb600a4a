"""LTP: tokens that receive little attention leave the sequence, by one learned threshold per layer (Kim et al., 2022).

With importance s of a token in layer l and threshold theta, training first multiplies the token's hidden state by

    M = sigmoid((s - theta) / temperature)

and minimizes the task's loss plus lambda times the sum over layers of the mean M, over weights and thresholds together.
Then the thresholds are frozen, tokens with s < theta are dropped, and the weights train on. Lambda is found by
bisection for the budget; the small difference that remains is closed by a shift of all thresholds.

Differences from the published code: importance is divided by the length without padding, and the first token always
stays. Importance falls with the length, so thresholds drop more of longer texts; with `relative` they do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from smelt.compression.base import METHODS, within
from smelt.compression.token_pruning.base import TokenPruning, TokenPruningRun
from smelt.errors import BudgetError
from smelt.models.token_pruning import SoftThresholds
from smelt.models.token_rules import ThresholdRule, TokenRule

LAMBDAS = (1e-3, 10.0)  # the range that is searched
_HALVINGS = 10  # of the interval in which the shift of the thresholds lies


@METHODS.register("ltp", paper="Kim et al., KDD 2022 (LTP, arXiv 2107.00910)", needs=("calibration data", "labels"))
@dataclass(frozen=True)
class Ltp(TokenPruning):
    """Use for classifiers of text whose latency counts: unimportant tokens leave the sequence layer by layer.

    How many leave depends on the text. Thresholds are learned, for weights that are trained with them.
    """

    soft_epochs: float = 1.0  # of training with soft thresholds, for each lambda that is tried; small data needs 10
    temperature: float = 1e-3  # of the soft thresholds; the paper tries 1e-4 to 2e-3
    final_threshold: float = 0.01  # at the start, thresholds rise linearly from 0 towards this
    relative: bool = False  # importance relative to its mean, which is 1 over the length: for data of other lengths
    threshold_lr: float | None = None  # learning rate of the thresholds; null: that of the weights
    regularization: float | None = None  # lambda, 0.01 to 0.2 in the paper; null: found by bisection for the budget
    trials: int = 5  # of the bisection, at most
    tolerance: float = 0.03  # MACs below the budget, of those of all tokens, at which the bisection ends

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self.name, "soft_epochs", self.soft_epochs, 1e-6, 1e6)
        within(self.name, "temperature", self.temperature, 1e-6, 1.0)
        within(self.name, "final_threshold", self.final_threshold, 0.0, 1.0)
        within(self.name, "trials", self.trials, 1, 30)
        within(self.name, "tolerance", self.tolerance, 0.0, 1.0)
        if self.threshold_lr is not None:
            within(self.name, "threshold_lr", self.threshold_lr, 1e-8, 1.0)
        if self.regularization is not None:
            within(self.name, "regularization", self.regularization, 0.0, 1e6)

    @property
    def training_epochs(self) -> float:
        return self.epochs + self.soft_epochs * (self.trials if self.regularization is None else 1)

    def least_counts(self, lengths: Tensor, layers: int) -> Tensor:
        """The first layer's attention computes all tokens; one stays."""
        return torch.cat([lengths[:, None], torch.ones(len(lengths), layers, dtype=lengths.dtype)], dim=1)

    def find_rule(self, run: TokenPruningRun) -> tuple[TokenRule, dict[str, Any]]:
        source = _state(run)
        low, high = (math.log10(value) for value in LAMBDAS)
        trials: list[dict[str, Any]] = []
        best: dict[str, Any] | None = None
        weights: dict[str, Tensor] = source
        fixed = self.regularization is not None
        for number in range(1 if fixed else self.trials):
            regularization = self.regularization if fixed else 10 ** ((low + high) / 2)
            assert regularization is not None
            trial = run.context.checkpoint.load_facts(f"trial-{number}")
            if trial is None:
                run.model.network.load_state_dict(source)
                trial = self._learn_thresholds(run, regularization, f"soft training {number + 1}")
                if self._is_nearer(trial, best):
                    weights = _state(run)
                    run.context.checkpoint.save("weights", weights)
                run.context.checkpoint.save_facts(f"trial-{number}", trial)
            elif self._is_nearer(trial, best):
                weights = run.context.checkpoint.load("weights") or source
            best = trial if self._is_nearer(trial, best) else best
            trials.append(trial)
            over = trial["macs_kept"] - self.budget.keep
            if -self.tolerance <= over <= 0:
                break
            low, high = ((low + high) / 2, high) if over > 0 else (low, (low + high) / 2)
        assert best is not None
        run.model.network.load_state_dict(weights)
        run.encoder.rule = ThresholdRule(tuple(best["thresholds"]), self.relative)
        rule = self._meet_budget(run, run.encoder.rule)
        return rule, {"regularization": best["regularization"], "trials": trials}

    def adjust_rule(self, run: TokenPruningRun, rule: TokenRule) -> TokenRule:
        assert isinstance(rule, ThresholdRule)
        return rule if run.macs() <= run.allowed_macs else self._meet_budget(run, rule)

    def _is_nearer(self, trial: dict[str, Any], best: dict[str, Any] | None) -> bool:
        """Return whether the MACs of a trial are nearer to the budget than those of the best one."""
        return best is None or abs(trial["macs_kept"] - self.budget.keep) < abs(best["macs_kept"] - self.budget.keep)

    def _learn_thresholds(self, run: TokenPruningRun, regularization: float, name: str) -> dict[str, Any]:
        """Train weights and thresholds together; return the thresholds and the MACs they leave."""
        encoder, layers = run.encoder, run.layers
        encoder.rule = ThresholdRule((0.0,) * layers)
        unit = run.mean_length if self.relative else 1.0  # thresholds of relative importance are so much larger
        base = torch.tensor(
            [unit * self.final_threshold * layer / layers for layer in range(layers)], device=run.device
        )
        offsets = nn.Parameter(torch.zeros(layers, device=run.device))
        scale = 1.0 if self.threshold_lr is None else self.threshold_lr / self.optimizer.lr
        encoder.token_offsets = offsets  # a parameter of the network, so that it trains and is checkpointed
        encoder.soft = SoftThresholds(base, offsets, unit * scale, unit * self.temperature, self.relative)
        try:
            facts = run.train(name.replace(" ", "-"), self.soft_epochs, "last", regularization)
            thresholds = encoder.soft.thresholds.detach().double().clamp(min=0.0).tolist()
        finally:
            encoder.soft = None
            del encoder.token_offsets
        encoder.rule = ThresholdRule(tuple(thresholds), self.relative)
        return {
            "regularization": regularization,
            "thresholds": thresholds,
            "macs_kept": run.macs() / run.dense_macs,
            "loss": facts["final_loss"],
        }

    def _meet_budget(self, run: TokenPruningRun, rule: ThresholdRule) -> ThresholdRule:
        """Shift the thresholds, later layers more, until the MACs are just within the budget."""

        def shifted(shift: float) -> ThresholdRule:
            steps = enumerate(rule.thresholds)
            values = (max(value + unit * shift * (layer + 1) / run.layers, 0.0) for layer, value in steps)
            return ThresholdRule(tuple(values), self.relative)

        def fits(shift: float) -> bool:
            run.encoder.rule = shifted(shift)
            return run.macs() <= run.allowed_macs

        unit, step = run.mean_length if self.relative else 1.0, 1e-4
        if fits(0.0):
            low, high = -step, 0.0
            while fits(low) and low > -1.0:
                low, high = 2 * low, low
        else:
            low, high = 0.0, step
            while not fits(high):
                low, high = high, 2 * high
                if high > 4 * run.layers:  # importance is at most 1
                    raise BudgetError(
                        f"no threshold of {self.name} reaches macs={self.budget.keep:g} with the trained weights; "
                        "allow more."
                    )
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return shifted(high)


def _state(run: TokenPruningRun) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in run.model.network.state_dict().items()}
